# SPDX-License-Identifier: Apache-2.0
"""Whole runs whose engines are outside of the job and are lost on the way: nothing is lost, learned twice or changed.

Not covered: GPUs, and hosts that share neither CPUs nor files.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from elastic_runs import ELASTIC, HF, engines, start_engine

from distributed import run_ranks
from golden_runs import compare, observe
from megatron_rl.engines.elastic.front import Front
from megatron_rl.engines.elastic.member import EngineProcess
from megatron_rl.engines.local.transformers import HuggingFaceEngine
from rl_runs import overrides_for, read_records, train

# An engine in the job shares its weights with the actor, where this is possible.
TRAFFIC = ("metrics: reshard/bytes_", "metrics: samples/bytes_per_rank.")


def run(task: Path, run_dir: Path, *extra: str, prepare: Any = lambda: None, world_size: int = 1) -> None:
    """Train, with engines outside of the job if `extra` says so."""

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
    """One engine outside of the job, bit for bit."""
    with engines(tmp_path / "run", 1) as processes:
        run(task, tmp_path / "run", *ELASTIC)
        processes[0].join(10)
        assert processes[0].exitcode == 0
    assert_equal(undisturbed, tmp_path / "run")
    assert [record["engines/lost"] for record in read_records(tmp_path / "run")] == [0, 0]


def wait_for_engines(front: Front, count: int) -> None:
    """Wait until so many serve."""
    deadline = time.monotonic() + 30
    while sum(member.is_ready for member in front._members) < count:
        assert time.monotonic() < deadline, "an engine has not joined"
        front._hear(0.05)


def disturb(act: Callable[[], Any], count: int = 2) -> Callable[[], None]:
    """Return a preparation of a rank: `act` once all engines generate in the second step; await all in the third."""

    def prepare() -> None:
        real, acted = Front.step, []

        def step(front: Front) -> Any:
            if front._updates == 1 or acted and front._updates == 3:
                wait_for_engines(front, count)
            elif front._updates == 2 and not acted and sum(bool(member.running) for member in front._members) == count:
                acted.append(act())
            return real(front)

        Front.step = step

    return prepare


def fail_in_second_version(flag: Path) -> None:
    """Let the first engine to reach its second weights raise in the middle of a batch."""
    real, versions = HuggingFaceEngine.step, []
    load = EngineProcess._load

    def note(engine: EngineProcess, version: int) -> None:
        versions.append(version)
        load(engine, version)

    def step(engine: HuggingFaceEngine) -> Any:
        if versions[-1] == 2 and not flag.exists():
            flag.touch()
            raise ZeroDivisionError("planted")
        return real(engine)

    EngineProcess._load, HuggingFaceEngine.step = note, step


def test_a_killed_engine_changes_nothing(task: Path, tmp_path: Path, undisturbed: Path) -> None:
    """One of two, by kill -9 while it generates: bit for bit, as samples do not depend on their batch here."""
    with engines(tmp_path / "run", 2) as (lost, other):
        run(task, tmp_path / "run", *ELASTIC, prepare=disturb(lambda: os.kill(lost.pid or 0, signal.SIGKILL)))
        other.join(10)
        assert (lost.exitcode, other.exitcode) == (-signal.SIGKILL, 0)
    assert_equal(undisturbed, tmp_path / "run")
    records = read_records(tmp_path / "run")
    assert [record["engines/members"] for record in records] == [2, 1] and records[1]["engines/lost"] == 1
    assert "its 16 requests are repeated with equal seeds" in read_front(tmp_path / "run")


@pytest.fixture(scope="module")
def longer(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of three steps."""
    run_dir = tmp_path_factory.mktemp("longer") / "run"
    run(task, run_dir, "trainer.total_steps=3")
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("what", ["raises", "sleeps", "leaves", "returns"])
def test_other_losses_change_nothing(task: Path, tmp_path: Path, longer: Path, what: str) -> None:
    """An engine that raises, that is suspended for longer than the limit and then joins again, that is told to leave,
    and one that is killed and started again.
    """
    run_dir, flag = tmp_path / "run", tmp_path / "raised"
    settings = (*ELASTIC, "schedule.silent_seconds=1", "trainer.total_steps=3")
    started: list[BaseProcess] = []

    def act(lost: int) -> None:
        if what == "sleeps":
            os.kill(lost, signal.SIGSTOP)
            threading.Timer(3.0, os.kill, (lost, signal.SIGCONT)).start()
        elif what in ("leaves", "returns"):
            os.kill(lost, signal.SIGUSR1 if what == "leaves" else signal.SIGKILL)
        started.append(start_engine(run_dir)) if what != "sleeps" else None

    def prepare_engine() -> None:
        if what == "raises":
            fail_in_second_version(flag)

    with engines(run_dir, 2, prepare_engine) as (lost, other):
        if what == "raises":  # a third engine takes the place of the one that raises
            with engines(run_dir, 1):
                run(task, run_dir, *settings, prepare=disturb(lambda: None))
        else:
            run(task, run_dir, *settings, prepare=disturb(lambda: act(lost.pid or 0)))
        for process in (lost, other):
            process.join(20)
        codes = sorted([lost.exitcode or 0, other.exitcode or 0])
    assert codes == {"raises": [0, 1], "sleeps": [0, 0], "leaves": [0, 0], "returns": [-9, 0]}[what]
    assert_equal(longer, run_dir)
    lost_in_all = read_records(run_dir)[-1]["engines/lost"]
    assert lost_in_all == (what != "leaves")
    words = {"raises": "(ZeroDivisionError: planted)", "sleeps": "(silence)", "leaves": "leaves and gives back 16"}
    assert words.get(what, "s after a loss") in read_front(run_dir)
