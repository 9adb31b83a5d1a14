# SPDX-License-Identifier: Apache-2.0
"""Environments in their own processes: answers, failures, and complete cleanup.

Not covered: a process that the kernel cannot kill.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_rl.agents.environment import (
    Calculator,
    Done,
    Observation,
    Reply,
    ToolCall,
    calculate,
    check_answer,
    find_environment,
)
from megatron_rl.agents.episode import Opening, Setup
from megatron_rl.agents.in_rank import EpisodeProcesses
from megatron_rl.types import Prompt, UserError
from tools.make_toy_task import train_tokenizer

ENVIRONMENT = """
import os, random, subprocess, sys, time
import numpy
from megatron_rl.agents.environment import Done, Observation

random.gauss(0, 1), numpy.random.randn()  # both keep a second number for the next call

class Odd:
    def reset(self, task):
        self.kind, self.lucky = task.row["kind"], random.random()
        if self.kind == "hangs at first":
            time.sleep(1000)
        if self.kind == "raises at first":
            raise RuntimeError("no game today")
        return Observation([])

    def step(self, reply):
        if self.kind == "hangs":
            time.sleep(1000)
        if self.kind == "exits":
            os._exit(3)
        if self.kind == "is killed":
            os.kill(os.getpid(), 9)
        if self.kind == "shouts":
            for _ in range(100):
                os.write(1, b"x" * (1 << 20))
                os.write(2, b"x" * (1 << 20))
        if self.kind == "starts others":
            subprocess.Popen(["sleep", "4321"], start_new_session=True)
            subprocess.run("setsid sleep 4321 &", shell=True)
        if self.kind == "starts one and hangs":
            subprocess.Popen(["sleep", "1000.25"], start_new_session=True)
            time.sleep(1000)
        if self.kind == "returns nothing":
            return None
        if self.kind == "has no number":
            return Done(float("nan"))
        if self.kind == "never ends":
            return Observation([{"role": "tool", "content": "12"}], reward=0.5)
        if self.kind == "draws":
            return Done(random.gauss(0, 1), {"numpy": numpy.random.randn()})
        return Done(self.lucky, {"length": len(reply.text)})
"""


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    directory = tmp_path_factory.mktemp("environment")
    (directory / "odd.py").write_text(ENVIRONMENT)
    (directory / "tokenizer.model").write_bytes(train_tokenizer("0123456789=+"))
    tokenizer = str(directory / "tokenizer.model")  # quick to read, unlike tokenizers of transformers
    return Setup(f"{directory / 'odd.py'}:Odd", tokenizer, {}, (2,), False, max_turns=3, run_seed=1)


@pytest.fixture
def processes(setup):
    found = EpisodeProcesses(setup, 5.0)
    yield found
    found.close_all()


def prompt_of(kind, number=0):
    return Prompt(number, np.array([4, 5], np.int32), "12", "", row={"kind": kind})


def run(processes, *kinds):
    """Return the last answer of episodes with constant replies."""
    found, open_keys = {}, set(range(len(kinds)))
    for key, kind in enumerate(kinds):
        processes.open(key, prompt_of(kind))
    while open_keys:
        for key, answer in processes.wait().items():
            if answer.tail is None:
                found[key] = answer
                processes.close(key)
                open_keys.discard(key)
            else:
                processes.send_reply(key, [4, 5, 6], [0.0] * 3, "stop")
    return [found[key] for key in range(len(kinds))]


def sleepers():
    return subprocess.run(["pgrep", "-f", "sleep 4321"], capture_output=True, text=True).stdout.split()


def test_an_answer_has_the_reward_of_its_reply_and_the_last_one_components(processes):
    ends, never = run(processes, "ends", "never ends")
    assert 0 < ends.reward < 1 and ends.components == {"length": 3.0} and ends.finish_reason is None
    assert (never.reward, never.finish_reason) == (0.5, "turns")


def test_episodes_on_a_prompt_draw_the_same_random_numbers(processes):
    processes.open(0, prompt_of("ends"))
    processes.open(1, prompt_of("ends"))
    processes.open(2, prompt_of("ends", number=1))
    processes.wait()
    for key in range(3):
        processes.send_reply(key, [4], [0.0], "stop")
    rewards = [answer.reward for _, answer in sorted(processes.wait().items())]
    assert rewards[0] == rewards[1] != rewards[2]


def test_an_episode_draws_what_its_seed_says_whatever_was_drawn_before_it(setup, processes):
    """Generators of normal numbers make two at a time: the import has left one of numpy's; a fork drops Python's."""
    (answer,) = run(processes, "draws")
    seed = Opening.of(prompt_of("draws"), setup.run_seed).task.seed
    python, legacy = random.Random(seed), np.random.RandomState(seed)
    python.random()
    assert (answer.reward, answer.components) == (python.gauss(0, 1), {"numpy": legacy.randn()})


@pytest.mark.parametrize("most", [1, 3])
def test_an_episode_ends_with_the_answer_to_its_last_reply(setup, most):
    processes, replies = EpisodeProcesses(replace(setup, max_turns=most), 5.0), 0
    processes.open(0, prompt_of("never ends"))
    while (answer := processes.wait()[0]).tail is not None:
        replies += 1
        processes.send_reply(0, [4, 5, 6], [0.0] * 3, "stop")
    processes.close_all()
    assert replies == most and (answer.reward, answer.finish_reason) == (0.5, "turns")


def test_every_failure_is_an_answer_and_concerns_no_other_episode(setup):
    processes = EpisodeProcesses(setup, 1.0)
    started = time.monotonic()
    kinds = "hangs at first", "raises at first", "hangs", "exits", "is killed", "returns nothing", "has no number"
    answers = run(processes, "ends", *kinds, "ends")
    seconds = time.monotonic() - started
    processes.close_all()
    assert seconds < 20  # two deadlines of a second, and the start
    reasons = [None, "timeout", "error", "timeout", "error", "error", "error", "error", None]
    assert [answer.finish_reason for answer in answers] == reasons
    said = [answer.failure for answer in answers]
    assert "agents.turn_timeout_seconds = 1" in said[1] and "agents.turn_timeout_seconds = 1" in said[3]
    assert "no game today" in said[2] and "odd.py" in said[2]
    assert "its process has ended" in said[4] and "its process has ended" in said[5]
    assert "NoneType instead of Observation or Done" in said[6] and "reward = nan" in said[7]
    assert answers[0].reward == answers[8].reward


def test_what_is_shouted_goes_nowhere(processes, capfd):
    (answer,) = run(processes, "shouts")
    assert answer.finish_reason is None and answer.reward is not None
    assert capfd.readouterr().out == ""


def test_what_an_episode_has_started_ends_with_it(processes):
    assert not sleepers()
    processes.open(0, prompt_of("starts others"))
    processes.wait()
    processes.send_reply(0, [4], [0.0], "stop")
    assert processes.wait()[0].reward is not None and len(sleepers()) == 2
    processes.close(0)
    run(processes, "ends")  # the worker has read that the other is over
    deadline = time.monotonic() + 10
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sleepers()


def test_no_process_outlives_a_rank_that_is_killed(setup, tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, sys, pickle, signal\n"
        "from megatron_rl.agents.in_rank import EpisodeProcesses\n"
        f"setup, prompts = pickle.loads(open({str(tmp_path / 'args')!r}, 'rb').read())\n"
        "processes = EpisodeProcesses(setup, 20.0)\n"
        "[processes.open(key, prompt) for key, prompt in enumerate(prompts)]\n"
        "processes.wait()\n"
        "processes.send_reply(0, [4], [0.0], 'stop')\n"
        "print(processes._worker._process.pid, *[r.pid for r in processes._running.values()], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "args").write_bytes(pickle.dumps((setup, [prompt_of("hangs"), prompt_of("ends")])))
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    told = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, cwd=root).stdout
    pids = [int(pid) for pid in told.split()]
    assert len(pids) == 3
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


HANGING = """
import pickle, sys
from megatron_rl.agents.in_rank import EpisodeProcesses
setup, prompt = pickle.loads(open(sys.argv[1], "rb").read())
processes = EpisodeProcesses(setup, 200.0)
processes.open(0, prompt)
processes.wait()
processes.send_reply(0, [4], [0.0], "stop")
print(processes._running[0].pid, flush=True)
processes.wait()
"""


@pytest.mark.parametrize(
    "killed", ["both", "watcher and rank", *(pytest.param(one, marks=pytest.mark.slow) for one in ("rank", "worker"))]
)
def test_what_an_episode_has_started_ends_whoever_is_killed(setup, tmp_path, killed):
    """In a session of its own: neither a process group nor the death of its parent reaches it."""
    (tmp_path / "args").write_bytes(pickle.dumps((setup, prompt_of("starts one and hangs"))))
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", HANGING, str(tmp_path / "args")]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root)
    episode = psutil.Process(int(rank.stdout.readline()))
    deadline = time.monotonic() + 20
    while not (started := [one for one in episode.children() if one.cmdline()[:2] == ["sleep", "1000.25"]]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    worker = episode.parent()
    victims = {"rank": [rank], "worker": [worker], "both": [rank, worker], "watcher and rank": [worker.parent(), rank]}
    try:
        for victim in victims[killed]:
            victim.kill()
        assert not psutil.wait_procs([episode, worker, *started], timeout=10)[1]
    finally:
        for one in (rank, *started):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        rank.communicate()


def is_alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_worker_that_is_killed_takes_its_episodes_along_and_is_started_again(processes):
    processes.open(0, prompt_of("ends"))
    processes.wait()
    psutil.Process(processes._running[0].pid).parent().kill()
    time.sleep(0.5)
    processes.send_reply(0, [4], [0.0], "stop")
    assert processes.wait()[0].finish_reason == "error"
    assert run(processes, "ends")[0].finish_reason is None


def test_an_environment_that_is_not_there_is_named(setup, tmp_path):
    (tmp_path / "half.py").write_text("class Half:\n    def reset(self, task): ...\n")
    for name, message in (
        ("chess", "names no environment"),
        (f"{tmp_path / 'half.py'}:Half", "has no method step"),
        (f"{tmp_path / 'half.py'}:Whole", 'defines no "Whole"'),
    ):
        with pytest.raises(UserError, match=message):
            find_environment(name)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*34", "408"), ("(1 + 2) * -3", "-9"), ("7 / 2", "3.5"), ("7 // 2 + 7 % 4", "6")]
    + [(bad, "error") for bad in ("", "1/0", "2**3", "x", "abs(1)", "True", "1" * 201, "'a'", "(" * 150)],
)
def test_the_calculator_computes_numbers_and_nothing_else(expression, value):
    assert calculate(expression) == value


def test_the_calculator_answers_calls_and_brackets_and_ends_with_any_other_reply():
    asked = Reply("", [ToolCall("calculate", {"expression": "6*7"}), ToolCall("search", {})], "stop")
    assert Calculator().step(asked) == Observation([{"role": "tool", "content": x} for x in ("42", "error")])
    assert Calculator().step(Reply("so [12*34]", [], "stop")) == Observation([{"role": "tool", "content": "[408]"}])
    assert Calculator().step(Reply("[12*34] is 408", [], "stop")) == Done()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Observation([], reward=1e308), "reward = 1e+308"),
        (Done(-1e308), "reward = -1e+308"),
        (Done(float("nan"), {"reward": 1.0}), "a component named 'reward'"),
        (Done(1.0, {"std": 1.0}), "a component named 'std'"),
        (Done(1.0, {"": 1.0}), "a component named ''"),
        (Done(1.0, {"n" * 500: 1.0}), "1 to 100 printable characters"),
        (Done(1.0, {"a/b": 1.0}), "without a slash"),
        (Done(1.0, {"a\n": 1.0}), "a component named"),
        (Done(1.0, {3: 1.0}), "a component named 3"),
        (Done(1.0, {"calls": float("inf")}), "calls = inf"),
    ],
)
def test_answers_that_cannot_be_counted_are_refused(answer, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check_answer(answer)
