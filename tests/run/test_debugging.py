# SPDX-License-Identifier: Apache-2.0
"""A debugger stops one rank in a reward function, in an environment and in its update, while the others wait.

The client speaks the protocol that IDEs speak. Not covered: IDEs, NCCL, Ray, and the processes of reward workers
and of programs as agents, which are not debugged.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dap_client import DapClient
from distributed import run_ranks
from launch_runs import ROOT, environment
from megatron_rl.config.fields import dump_yaml
from megatron_rl.run.guard import wait_for_debugger
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError
from rl_runs import overrides_for, read_records, train

needs_debugpy = pytest.mark.skipif(importlib.util.find_spec("debugpy") is None, reason="debugpy is not installed")
PROGRAM = """
import sys
from pathlib import Path
from megatron_rl.run.loading import load_config
from megatron_rl.run.guard import wait_for_debugger

config = wait_for_debugger(load_config(Path(sys.argv[1]), ["--debug-rank", "0"]).config, 1)
for step in range(1, 4):
    doubled = 2 * step
print("limit", config.trainer.collective_timeout)
"""
ENVIRONMENT = """
import random
from megatron_rl.agents.environment import Done, Observation

class Dice:
    def reset(self, task):
        self.turns = 0
        return Observation([])

    def step(self, reply):
        self.turns += 1
        rolled = random.random()
        if self.turns == 2:
            return Done(rolled, {"digits": float(sum(letter.isdigit() for letter in reply.text))})
        return Observation([{"role": "tool", "content": "12="}], reward=0.5 * rolled)
"""


def line_of(path: Path, text: str) -> int:
    (number,) = [number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line]
    return number


def find_port(output: Path, rank: int, process: subprocess.Popen[bytes]) -> int:
    """Return the port printed by the waiting rank."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(rf"rank {rank} waits for a debugger at 127\.0\.0\.1:(\d+)", output.read_text())
        if found:
            return int(found[1])
        time.sleep(0.05)
    raise AssertionError(output.read_text()[-4000:])


def write_recipe(task: Path, path: Path, *extra: str) -> Path:
    path.write_text(dump_yaml(load_config(None, overrides_for(task, path.parent / "run", *extra)).config))
    return path


def start_ranks(num_ranks: int, output: Path, recipe: Path, *settings: str) -> subprocess.Popen[bytes]:
    """The program under torchrun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    with output.open("wb") as file:
        return subprocess.Popen(
            [*launch, "launch/pretrain_grpo.py", str(recipe), *settings],
            cwd=ROOT,
            stdout=file,
            stderr=file,
            env=environment(),
        )


@needs_debugpy
def test_a_program_waits_for_the_debugger(task: Path, tmp_path: Path) -> None:
    """The program stops at a breakpoint that was set while it waited, and waits no shorter than a week for others."""
    program, output = tmp_path / "program.py", tmp_path / "output"
    program.write_text(PROGRAM)
    recipe = write_recipe(task, tmp_path / "recipe.yaml", "--explain", "--debug-rank=1")
    assert not any(word in recipe.read_text() for word in ("explain:", "debug_rank", "flags"))
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(program), str(recipe)],
            stdout=file,
            stderr=file,
            env=environment(PYTHONPATH=str(ROOT)),
        )
    with DapClient(find_port(output, 0, process), {program: [line_of(program, "doubled =")]}) as client:
        thread, frame = client.wait_for_stop()
        assert Path(frame["source"]["path"]) == program and client.evaluate("step", frame) == "1"
        client.set_breakpoints(program, [])
        client.request("continue", threadId=thread)
        assert process.wait(180) == 0
    assert "limit 604800.0" in output.read_text()


@needs_debugpy
@pytest.mark.slow
def test_an_update_and_a_reward_are_stopped_in(task: Path, tmp_path: Path) -> None:
    """Under torchrun, longer than collectives may take otherwise; the run finishes with its usual numbers."""
    common = ("trainer.save_freq=null", "data.validation_files=[]", "rollout.engine=hf")
    recipe = write_recipe(task, tmp_path / "recipe.yaml", *common, "trainer.collective_timeout=2")
    output = tmp_path / "output"
    process = start_ranks(4, output, recipe, "--debug-rank", "2")
    reward, update = task / "reward.py", ROOT / "megatron_rl/training/optimizer.py"
    with DapClient(find_port(output, 2, process), {reward: [line_of(reward, "digits = sum")]}) as client:
        thread, frame = client.wait_for_stop()
        assert Path(frame["source"]["path"]) == reward and frame["name"] == "score"
        assert client.evaluate("ground_truth.isdigit()", frame) == "True"
        client.set_breakpoints(reward, [])
        client.set_breakpoints(update, [line_of(update, "lr = optimizer.advance_schedule(")])
        time.sleep(4)  # the others wait longer than trainer.collective_timeout
        client.request("continue", threadId=thread)
        thread, frame = client.wait_for_stop()
        assert Path(frame["source"]["path"]) == update and frame["name"] == "optim_step"
        assert client.evaluate("(self._role, optimizer.steps)", frame) == "('actor', 0)"
        assert client.evaluate("__import__('torch').distributed.get_rank()", frame) == "2"
        client.set_breakpoints(update, [])
        client.request("continue", threadId=thread)
        assert process.wait(180) == 0, output.read_text()[-4000:]
    assert "no progress" not in output.read_text()
    assert (
        run_ranks(_train, 4, overrides_for(task, tmp_path / "undebugged", *common), timeout=120) == [(None, False)] * 4
    ), "no rank imports debugpy"
    assert read_records(tmp_path / "run") == read_records(tmp_path / "undebugged")


@needs_debugpy
@pytest.mark.slow
def test_an_environment_is_stopped_in(task: Path, tmp_path: Path) -> None:
    """For longer than an answer, an episode and collectives may take otherwise; the run has its usual numbers."""
    file, output = tmp_path / "dice.py", tmp_path / "output"
    file.write_text(ENVIRONMENT)
    common = (
        "trainer.save_freq=null",
        "data.validation_files=[]",
        "rollout.engine=hf",
        "data.max_response_length=24",
    )
    common += (f"agents.environment={file}:Dice", "actor.max_tokens_per_microbatch=256")
    deadlines = ("trainer.collective_timeout=9", "agents.turn_timeout_seconds=8")
    process = start_ranks(
        2, output, write_recipe(task, tmp_path / "recipe.yaml", *common, *deadlines), "--debug-rank", "1"
    )
    with DapClient(find_port(output, 1, process), {file: [line_of(file, "return Done")]}) as client:
        thread, frame = client.wait_for_stop()
        assert Path(frame["source"]["path"]) == file and frame["name"] == "step"
        assert (
            client.evaluate("self.turns", frame) == "2" and client.evaluate("type(reply).__name__", frame) == "'Reply'"
        )
        assert client.evaluate("__import__('torch').distributed.get_rank()", frame) == "1"
        client.set_breakpoints(file, [])
        time.sleep(12)
        client.request("continue", threadId=thread)
        assert process.wait(180) == 0, output.read_text()[-4000:]
    assert "no progress" not in output.read_text()
    assert (
        run_ranks(_train, 2, overrides_for(task, tmp_path / "undebugged", *common), timeout=120) == [(None, False)] * 2
    )
    debugged = read_records(tmp_path / "run")
    assert debugged == read_records(tmp_path / "undebugged")
    assert debugged[0]["agents/turns"] > 1 and not debugged[0]["agents/errors"]


def _train(rank: int, world_size: int, overrides: list[str]) -> tuple[str | None, bool]:
    return train(rank, world_size, overrides), "debugpy" in sys.modules


def test_what_cannot_be_debugged_is_refused(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the config and the size of the job alone, so that every rank refuses before the ranks meet."""

    def load(*extra: str) -> None:
        config = wait_for_debugger(load_config(None, overrides_for(task, task, *extra)).config, 4)
        assert config.trainer.collective_timeout == 7 * 24 * 3600

    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "debugpy" else found(name))
    load("--debug-rank", "3")
    with pytest.raises(UserError, match="--debug-rank 4 in a job of 4 ranks"):
        load("--debug-rank=4")
    with pytest.raises(UserError, match="--debug-rank -1"):
        load("--debug-rank", "-1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "debugpy" else found(name))
    with pytest.raises(UserError, match=r"needs the package debugpy(.|\n)*pip install debugpy"):
        load("--debug-rank=3")
