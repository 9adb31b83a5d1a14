# SPDX-License-Identifier: Apache-2.0
"""A hang is ended within its limit, with one report of who waits for whom and everybody's stacks.

On real gloo ranks. Not covered: NCCL, and hangs under torchrun (tests/launch/test_restarts.py).
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.observability.metrics import log_path
from megatron_rl.observability.progress import PhaseTimers, open_rank_log
from megatron_rl.parallel import collectives, pairs
from megatron_rl.parallel.collectives import broadcast_tensors, open_store, world
from megatron_rl.run.opening import StopRequest
from megatron_rl.run.watchdog import Watchdog, Watched

LIMIT = 1.0


@pytest.fixture(autouse=True)
def quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.run.watchdog._ANSWER_SECONDS", 1.0)
    monkeypatch.setattr("megatron_rl.run.watchdog._SHOWN_SECONDS", 1.0)


def watch(
    rank: int,
    world_size: int,
    directory: Path,
    *,
    limit: float = LIMIT,
    is_stopping: Callable[[], bool] = lambda: False,
) -> tuple[Watchdog, PhaseTimers]:
    timers = PhaseTimers()
    watched = Watched(
        rank, world_size, timers, limit, log_path(directory, rank), open_rank_log(directory, rank), is_stopping
    )
    return Watchdog(watched, open_store("watchdog", dist.group.WORLD)), timers


def end_by_watchdog(world_size: int, directory: Path, hang: Callable[[int, PhaseTimers], None], code: int = 70) -> str:
    """Run ranks that hang; the parent's view, and that every rank left with the code within the limit."""

    def on_rank(rank: int, size: int) -> None:
        _, timers = watch(rank, size, directory)
        for step in (1, 2):
            timers.begin_step(step)
            with timers.phase("rollout"):
                dist.barrier()
        hang(rank, timers)

    start = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_ranks(on_rank, world_size, timeout=40)
    assert time.monotonic() - start < LIMIT + 20
    assert f"(exit code {code}) without a result" in str(caught.value)
    return str(caught.value)


def test_a_late_rank_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One rank sleeps over its reward; the others wait in a group without rank 0, and in the world."""

    def sleep_over_reward(rank: int, timers: PhaseTimers) -> None:
        group = dist.new_group([1, 2])
        with timers.phase("reward"):
            if rank == 1:
                time.sleep(60)
            elif rank == 2:
                dist.all_reduce(torch.ones(1), group=group)
            dist.all_gather_object([None] * 3, "score")

    end_by_watchdog(3, tmp_path, sleep_over_reward)
    report = (tmp_path / "logs/rank0.log").read_text()
    verdict = "ranks 0,2 waited for rank 1 in step 2, phase reward"
    assert f"no progress in 1 s (trainer.collective_timeout): {verdict}" in report
    assert "rank 0: step 2, phase reward: waits in all_gather_object of ranks 0-2 for 1 s (test_watchdog.py:" in report
    assert "rank 2: step 2, phase reward: waits in all_reduce of ranks 1-2" in report
    assert "rank 1: step 2, phase reward: is in no collective" in report
    lines = report.splitlines()
    place = next(index for index, line in enumerate(lines) if "rank 1: step 2" in line)
    assert re.fullmatch(r" +barrier #\d+ of ranks 0,1,2, begun \d+\.\d s ago, done", lines[place + 3]), lines[place:]
    assert "collective of rank 2: all_reduce #1 of ranks 1,2, begun" in (tmp_path / "logs/rank2.log").read_text()
    for rank in range(3):
        stacks = (tmp_path / f"logs/rank{rank}.log").read_text()
        assert f"stacks of all threads of rank {rank}" in stacks and "sleep_over_reward" in stacks
    assert capfd.readouterr().err.count(verdict) == 1, "one report on the console"


def test_a_stopped_process_is_named(tmp_path: Path) -> None:
    """SIGSTOP: no thread of it runs. It is rank 0, so another rank shows the report."""

    def stop(rank: int, timers: PhaseTimers) -> None:
        with timers.phase("reshard"):
            if rank == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            dist.barrier()

    end_by_watchdog(2, tmp_path, stop)
    report = (tmp_path / "logs/rank1.log").read_text()
    assert "rank 1 waited for rank 0 in step 2, phase reshard, barrier" in report
    assert "rank 0: no answer; its process is gone or stopped" in report


@pytest.mark.skipif(torch.cuda.is_available(), reason="pairs are for machines without CUDA")
@pytest.mark.parametrize("operation", ["all_reduce", "receive"])
def test_a_rank_that_waits_in_shared_memory_is_seen(operation: str, tmp_path: Path) -> None:
    """The pair itself would wait much longer than the limit."""

    def wait_in_pair(rank: int, timers: PhaseTimers) -> None:
        pairs.open_pair(world(), timedelta(seconds=20))
        assert collectives.find_pair(world(), 8) is not None
        with timers.phase("update"):
            if rank == 0:
                time.sleep(60)
            elif operation == "all_reduce":
                pairs.all_reduce(torch.ones(1), group=world())
            else:
                broadcast_tensors([torch.ones(1)], 0, world())

    end_by_watchdog(2, tmp_path, wait_in_pair)
    report = (tmp_path / "logs/rank1.log").read_text()
    assert f"rank 1 waited for rank 0 in step 2, phase update, {operation}\n" in report
    ranks = " of ranks 0-1" if operation == "all_reduce" else ""
    assert f"rank 1: step 2, phase update: waits in {operation}{ranks} for 1 s (" in report


def test_who_works_is_left_alone(tmp_path: Path) -> None:
    """Long work outside of collectives, and many short waits in the same place, for longer than the limit."""

    def work(rank: int, world_size: int) -> str:
        watchdog, timers = watch(rank, world_size, tmp_path)
        end = time.monotonic() + 1.5 * LIMIT
        with timers.phase("update"):
            if rank == 0:
                time.sleep(1.5 * LIMIT)
            while time.monotonic() < end:
                time.sleep(0.05)
        for _ in range(30):
            with timers.phase("rollout"):
                time.sleep(0.1 * rank)
                dist.barrier()
        watchdog.close()
        time.sleep(1.5 * LIMIT if rank == 0 else 0)
        dist.barrier()
        return log_path(tmp_path, rank).read_text()

    assert run_ranks(work, 2, timeout=60) == ["", ""]


def test_a_rank_that_is_to_stop_does_not_wait_for_a_dead_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal is noticed although the program waits in C++, in which no Python handler runs."""
    monkeypatch.setattr("megatron_rl.run.watchdog._SILENT_SECONDS", 1.0)

    def on_rank(rank: int, world_size: int) -> None:
        stop = StopRequest(logging.getLogger())
        watch(rank, world_size, tmp_path, limit=60.0, is_stopping=lambda: stop.is_here)
        time.sleep(0.5)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 0 exited \(exit code 1\)"):
        run_ranks(on_rank, 2, timeout=40)
    assert time.monotonic() - start < 15
    report = (tmp_path / "logs/rank0.log").read_text()
    assert "rank 1 left the job, or is stopped, and gives no sign of life; last seen: rank 1 in step 0" in report
    assert "asked to stop, and no checkpoint is possible" in report
