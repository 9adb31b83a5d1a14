# SPDX-License-Identifier: Apache-2.0
"""Whole runs whose engines are outside the job and are lost on the way: nothing is lost, learned twice or changed.

Not covered: GPUs, and hosts that share neither CPUs nor files.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from elastic_runs import ELASTIC, HF, engines, read_samples, start_ranks

from distributed import find_free_port, run_ranks
from golden_runs import compare, observe
from launch_runs import ROOT, environment
from megatron_rl.config.fields import dump_yaml
from megatron_rl.engines.elastic.front import Front
from megatron_rl.engines.elastic.member import EngineProcess
from megatron_rl.engines.local.transformers import HuggingFaceEngine
from megatron_rl.observability.status import StatusPage
from megatron_rl.run.loading import load_config
from namespaces import Host, can_make_hosts, two_hosts
from rl_runs import import_engine, overrides_for, read_records, train

# An engine in the job shares its weights with the actor, where this is possible, and reports its load.
TRAFFIC = (
    *("metrics: reshard/bytes_", "metrics: samples/bytes_per_rank."),
    *("metrics: rollout/cache_max", "metrics: rollout/waiting_max"),
)


def run(task: Path, run_dir: Path, *extra: str, prepare: Any = lambda: None, world_size: int = 1) -> None:
    """Train, with engines outside the job if `extra` has these settings."""

    def work(rank: int, size: int) -> str | None:
        prepare()
        return train(rank, size, overrides_for(task, run_dir, *HF, *extra))

    assert run_ranks(work, world_size, timeout=170) == [None] * world_size


def assert_equal(expected: Path, found: Path) -> None:
    """Assert that two runs have equal metrics, rollouts and weights."""
    comparison = compare(observe(expected), observe(found))
    assert comparison.is_exact and min(comparison.counts.values()) > 30
    assert not [line for line in comparison.differences if not line.startswith(TRAFFIC)]
    assert {line for line in comparison.added if "engines/" not in line} == set()


def read_front(run_dir: Path) -> str:
    """Return the log of a run on one rank."""
    return (run_dir / "logs/rank0.log").read_text()


@pytest.fixture(scope="module")
def undisturbed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the engine in the job."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run(task, run_dir)
    return run_dir


def test_no_loss_changes_nothing(task: Path, tmp_path: Path, undisturbed: Path) -> None:
    """One engine outside the job, bit for bit."""
    with engines(tmp_path / "run", 1) as processes:
        run(task, tmp_path / "run", *ELASTIC)
        processes[0].join(10)
        assert processes[0].exitcode == 0
    assert_equal(undisturbed, tmp_path / "run")
    assert [record["engines/lost"] for record in read_records(tmp_path / "run")] == [0, 0]


def wait_for_engines(front: Front, count: int) -> None:
    """Wait until `count` engines serve."""
    deadline = time.monotonic() + 90  # shorter than the collective timeout of ELASTIC
    while sum(member.is_ready for member in front._members) < count:
        assert time.monotonic() < deadline, "an engine has not joined"
        front._hear(0.05)


def disturb(act: Callable[[], Any], count: int = 2) -> Callable[[], None]:
    """Return a preparation of a rank: `act` once all engines generate, from step 2 on; await all in step 3."""

    def prepare() -> None:
        real, acted = Front.step, []

        def step(front: Front) -> Any:
            if front._updates == 1 or acted and front._updates == 3:
                wait_for_engines(front, count)
            elif front._updates >= 2 and not acted and sum(bool(member.running) for member in front._members) == count:
                acted.append(act())
            return real(front)

        Front.step = step  # pyright: ignore[reportAttributeAccessIssue]

    return prepare


def fail_in_second_version(flag: Path) -> None:
    """Let the first engine to reach its second weights raise in the middle of a batch."""
    real, versions = HuggingFaceEngine.step, []
    load = EngineProcess._load

    def note(engine: EngineProcess, version: int) -> None:
        versions.append(version)
        load(engine, version)

    def step(engine: HuggingFaceEngine) -> Any:
        if versions[-1] == 2:
            with suppress(FileExistsError):  # of two at once, one is first
                flag.touch(exist_ok=False)
                raise ZeroDivisionError("planted")
        return real(engine)

    EngineProcess._load, HuggingFaceEngine.step = note, step  # pyright: ignore[reportAttributeAccessIssue]


def test_a_killed_engine_changes_nothing(task: Path, tmp_path: Path, undisturbed: Path) -> None:
    """One of two, by kill -9 while it generates: bit for bit, as samples do not depend on their batch here."""
    shown = tmp_path / "shown.jsonl"

    def prepare() -> None:
        disturb(lambda: os.kill(lost.pid or 0, signal.SIGKILL))()
        log = StatusPage.log

        def read(page: StatusPage, step: int, record: Any) -> None:
            log(page, step, record)
            with shown.open("a") as file:
                file.write(json.dumps(page.status()["members"]) + "\n")

        StatusPage.log = read  # pyright: ignore[reportAttributeAccessIssue]

    with engines(tmp_path / "run", 2) as (lost, other):
        run(task, tmp_path / "run", *ELASTIC, "observability.status_port=0", prepare=prepare)
        other.join(10)
        assert (lost.exitcode, other.exitcode) == (-signal.SIGKILL, 0)
    assert_equal(undisturbed, tmp_path / "run")
    records = read_records(tmp_path / "run")
    assert [record["engines/members"] for record in records] == [2, 1] and records[1]["engines/lost"] == 1
    assert "its 16 requests are repeated with equal seeds" in read_front(tmp_path / "run")
    first, second = ({one["state"]: one for one in json.loads(line)} for line in shown.read_text().splitlines())
    assert first.keys() == {"serves"} and second.keys() == {"serves", "lost"}
    assert (second["serves"]["version"], second["serves"]["newest_version"], second["serves"]["requests"]) == (2, 2, 0)
    assert f"engine {lost.pid} (" in second["lost"]["name"] and f"engine {other.pid} (" in second["serves"]["name"]


@pytest.fixture(scope="module")
def longer(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of three steps."""
    run_dir = tmp_path_factory.mktemp("longer") / "run"
    run(task, run_dir, "trainer.total_steps=3")
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("what", ["raises", "sleeps", "leaves", "returns"])
def test_other_losses_change_nothing(task: Path, tmp_path: Path, longer: Path, what: str) -> None:
    """An engine that raises, that is suspended for longer than the limit and then joins again, that must leave,
    and one that is killed and started again.
    """
    run_dir, flag = tmp_path / "run", tmp_path / "raised"
    settings = (*ELASTIC, "rollout.silent_seconds=1", "trainer.total_steps=3")

    def act(lost: int) -> None:
        if what == "sleeps":
            os.kill(lost, signal.SIGSTOP)
            threading.Timer(3.0, os.kill, (lost, signal.SIGCONT)).start()
        elif what in ("leaves", "returns"):
            os.kill(lost, signal.SIGUSR1 if what == "leaves" else signal.SIGKILL)

    def prepare_engine() -> None:
        if what == "raises":
            fail_in_second_version(flag)

    with engines(run_dir, 2, prepare_engine, again=what != "sleeps") as processes:
        lost, other, *_ = processes
        run(task, run_dir, *settings, prepare=disturb(lambda: act(lost.pid or 0)))
        for process in processes:
            process.join(20)
        codes = sorted([lost.exitcode or 0, other.exitcode or 0])
    assert codes == {"raises": [0, 1], "sleeps": [0, 0], "leaves": [0, 0], "returns": [-9, 0]}[what]
    assert_equal(longer, run_dir)
    lost_in_all = read_records(run_dir)[-1]["engines/lost"]
    assert lost_in_all == (what != "leaves")
    # An engine leaves after the step under way, which may have finished all of its responses.
    words = {
        "raises": r"\(ZeroDivisionError: planted\)",
        "sleeps": r"\(silence\)",
        "leaves": r"leaves and gives back \d+ ",
    }
    assert re.search(words.get(what, "s after a loss"), read_front(run_dir))


def hang_in_second_version(flag: Path) -> None:
    """Let the first engine to sample from its second weights stop in the middle, with heartbeats."""
    real, versions = HuggingFaceEngine.step, []
    load = EngineProcess._load

    def note(engine: EngineProcess, version: int) -> None:
        versions.append(version)
        load(engine, version)

    def step(engine: HuggingFaceEngine) -> Any:
        sampled = real(engine)
        if versions[-1] == 2:
            with suppress(FileExistsError):
                flag.mkdir()
                time.sleep(14)
        return sampled

    EngineProcess._load, HuggingFaceEngine.step = note, step  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_an_engine_that_hangs_is_lost(task: Path, tmp_path: Path, longer: Path) -> None:
    """Two fifths of `trainer.collective_timeout` without progress; it joins again when it continues."""
    run_dir = tmp_path / "run"
    settings = (*ELASTIC, "trainer.collective_timeout=25", "trainer.total_steps=3")

    with engines(run_dir, 2, lambda: hang_in_second_version(tmp_path / "hangs")) as processes:
        run(task, run_dir, *settings, prepare=disturb(lambda: None))
        for process in processes:
            process.join(20)
        assert [process.exitcode for process in processes] == [0, 0]
    assert_equal(longer, run_dir)
    assert [record["engines/lost"] for record in read_records(run_dir)] == [0, 1, 1]
    assert "is lost (no progress in 10 s): its 16 requests are repeated with equal seeds" in read_front(run_dir)
    assert "s after a loss" in read_front(run_dir)


def enter(host: Host) -> None:
    """Move this process to the network of a host."""
    with open(f"/run/netns/{host.name}") as network:
        assert ctypes.CDLL(None).setns(network.fileno(), 0) == 0


@pytest.mark.slow
def test_a_host_that_disappears_and_comes_back(task: Path, tmp_path: Path, longer: Path) -> None:
    """The cable to both engines is pulled while they generate, and plugged in again after they are lost."""
    if (reason := can_make_hosts()) is not None:
        pytest.skip(reason)
    run_dir = tmp_path / "run"
    settings = (*ELASTIC, "rollout.silent_seconds=1", "trainer.total_steps=3")
    with two_hosts() as (here, there):

        def cut() -> None:
            there.set_link("down")
            threading.Timer(4.0, there.set_link, ("up",)).start()

        def prepare() -> None:
            enter(here)
            disturb(cut)()

        with engines(run_dir, 2, lambda: enter(there)) as processes:
            run(task, run_dir, *settings, prepare=prepare)
            for process in processes:
                process.join(20)
            assert [process.exitcode for process in processes] == [0, 0]
    assert_equal(longer, run_dir)
    assert read_records(run_dir)[-1]["engines/lost"] == 2
    assert f"on {there.address} is lost (" in read_front(run_dir)


@pytest.mark.slow
def test_engines_join_the_restarted_job(task: Path, tmp_path: Path, longer: Path) -> None:
    """The job is killed in its second step and resumes; its engines wait for it, and keep their models."""
    run_dir, settings = tmp_path / "run", (*ELASTIC, "trainer.total_steps=3", "trainer.save_freq=1")
    overrides = overrides_for(task, run_dir, *HF, *settings)

    def work(rank: int, size: int) -> str | None:
        disturb(lambda: os.kill(os.getpid(), signal.SIGKILL))()
        return train(rank, size, overrides)

    with engines(run_dir, 2) as processes:
        run_ranks(work, 1, timeout=170, dying=(0,))
        assert all(process.is_alive() for process in processes)
        run(task, run_dir, *settings)
        for process in processes:
            process.join(20)
        assert [process.exitcode for process in processes] == [0, 0]
    expected, found = observe(longer), observe(run_dir)
    assert expected["rollouts"] == found["rollouts"] and expected["weights"] == found["weights"]


@pytest.mark.slow
def test_staleness_is_bounded_in_spite_of_losses(task: Path, tmp_path: Path) -> None:
    """Engines generate while the actor trains: each prompt is learned once, from tokens at most one step old."""
    run_dir = tmp_path / "run"
    settings = (
        *("schedule.max_staleness=1", "algorithm.importance_sampling=token-truncate", "trainer.total_steps=6"),
        *("placement.actor=0-0", "placement.reference=0-0", "placement.rollout=1-1"),
        *("rollout.max_num_seqs=4", "data.train_batch_size=4"),
        "rollout.silent_seconds=60",  # the one loss is a connection that ends; a busy machine makes no other
    )
    with engines(run_dir, 2, again=True) as processes:
        kill = disturb(lambda: os.kill(processes[0].pid or 0, signal.SIGKILL))
        run(task, run_dir, *ELASTIC, *settings, prepare=kill, world_size=2)
        for process in processes[1:]:
            process.join(60)
        assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0, 0]
    samples, records = read_samples(run_dir), read_records(run_dir)
    assert len(samples) == 6 * 4 * 4 and records[-1]["engines/lost"] == 1
    epochs = [[prompt for (step, prompt, sample) in samples if step in steps] for steps in ((1, 2, 3, 4), (5, 6))]
    assert Counter(epochs[0]) == dict.fromkeys(range(16), 4) and set(Counter(epochs[1]).values()) == {4}
    updates = 1  # of the optimizer in a step
    for (step, _, _), row in samples.items():
        assert all((step - 2) * updates <= version <= (step - 1) * updates for version in row["versions"])
    assert max(record["schedule/staleness_max"] for record in records) == 1


VLLM = ("rollout.engine=vllm", "rollout.bitwise=false", "data.validation_files=[]", "trainer.total_steps=2")


@pytest.mark.slow
def test_vllm_outside_of_the_job(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """Bit for bit its numbers in the job, if one engine gets the same requests at the same time."""
    run(task, tmp_path / "inside", *VLLM)
    with engines(tmp_path / "outside", 1, import_engine) as processes:
        run(task, tmp_path / "outside", *ELASTIC, *VLLM)
        processes[0].join(20)
        assert processes[0].exitcode == 0
    assert_equal(tmp_path / "inside", tmp_path / "outside")


@pytest.mark.slow
def test_an_engine_of_two_ranks(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """Each rank fetches its shards, and the first step draws the tokens of an engine of one rank."""
    settings = ("rollout.temperature=1.0", "data.validation_files=[]")
    one, two = (*VLLM, *settings, *ELASTIC), (*VLLM, *settings, *ELASTIC, "rollout.tensor_model_parallel_size=2")
    with engines(tmp_path / "one", 1, import_engine):
        run(task, tmp_path / "one", *one)
    ranks = start_ranks(tmp_path / "two", 2, import_engine, find_free_port())
    run(task, tmp_path / "two", *two)
    for process in ranks:
        process.join(20)
    assert [process.exitcode for process in ranks] == [0, 0]
    before, after = (read_samples(tmp_path / name) for name in ("one", "two"))
    first = [key for key in before if key[0] == 1]
    assert len(first) == 32 and all(before[key]["tokens"] == after[key]["tokens"] for key in first)


@pytest.mark.slow
def test_the_scripts(task: Path, tmp_path: Path) -> None:
    """A job and the script of its engines, which starts a killed engine again, and ends well with the run."""
    run_dir, recipe, joined = tmp_path / "run", tmp_path / "recipe.yaml", tmp_path / "joined"
    (tmp_path / "reward.py").write_text(  # steps of 1.6 s until the engine is back, so that it finds the job
        "import pathlib, time\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    time.sleep(0 if pathlib.Path({str(joined)!r}).exists() else 0.05)\n"
        "    return sum(c.isdigit() for c in solution_str) / 8.0\n"
    )
    settings = [f"reward.function={tmp_path}/reward.py:score", "trainer.total_steps=80", "rollout.silent_seconds=15"]
    overrides = overrides_for(task, run_dir, *HF, *ELASTIC, *settings)
    recipe.write_text(dump_yaml(load_config(None, overrides).config))
    command = [sys.executable, "launch/pretrain_grpo.py", str(recipe), f"trainer.run_dir={run_dir}"]
    with open(tmp_path / "job.log", "w") as log, open(tmp_path / "engine.log", "w") as said:
        job = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)
        script = subprocess.Popen(
            ["bash", "launch/engine.sh", str(run_dir)],
            cwd=ROOT,
            env=environment(ENGINES="2"),
            stdout=said,
            stderr=said,
        )
        try:
            wait_until(lambda: count_records(run_dir) >= 3, 240)
            (victim, *_) = list_engines(script.pid)
            victim.kill()
            wait_until(lambda: "after a loss" in read_front(run_dir), 240)
            joined.touch()
            assert job.wait(240) == 0 and script.wait(60) == 0, (tmp_path / "engine.log").read_text()
        finally:
            for process in (script, job):
                if process.poll() is None:
                    process.terminate()  # the script ends its engines
                    process.wait(60)
    records = read_records(run_dir)
    assert len(records) == 80 and records[-1]["engines/lost"] == 1


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def count_records(run_dir: Path) -> int:
    """Return the number of recorded steps."""
    file = run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def list_engines(script: int) -> list[psutil.Process]:
    """Return the engines of a script."""
    children = psutil.Process(script).children(recursive=True)
    return [child for child in children if "launch/engine.py" in child.cmdline()]
