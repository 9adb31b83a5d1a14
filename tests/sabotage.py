# SPDX-License-Identifier: Apache-2.0
"""Runs of the whole program that are hit by a signal at a chosen moment, on one rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import run_ranks
from megatron_rl.checkpoint.files import FileRecord
from megatron_rl.checkpoint.torch_dist import ChunkWriter
from megatron_rl.observability.progress import PhaseTimers
from megatron_rl.observability.run import Run
from megatron_rl.types import Preempted
from rl_runs import train


@dataclass(frozen=True)
class Blow:
    """A signal to one rank.

    Attributes:
        phase: in which it comes ("update", ...), or "record": between a step's checkpoint and its record, or "write":
            an exception in the thread that writes a checkpoint, and the signal in the update that follows.
        entry: at which entry of the phase, 1 being the first; an optimizer step enters "update" twice.
        rank: that is hit.
        delay: seconds after the entry; 0: at once.
        number: the signal.
        others: ranks that are hit at the same moment of their own.
        pause: seconds after which a stopped rank is continued.
    """

    phase: str
    entry: int = 1
    rank: int = 1
    delay: float = 0.0
    number: int = signal.SIGKILL
    others: tuple[int, ...] = ()
    pause: float = 0.0

    def strike(self) -> None:
        """Send the signal to this process."""
        if self.pause:
            subprocess.Popen(["sh", "-c", f"sleep {self.delay + self.pause}; kill -CONT {os.getpid()}"])
        if self.delay:
            threading.Timer(self.delay, os.kill, (os.getpid(), self.number)).start()
        else:
            os.kill(os.getpid(), self.number)
            time.sleep(0.0)  # let Python run its handler


def expect(blow: Blow) -> None:
    """Make this process strike itself."""
    real_phase, real_record, real_close, entries = PhaseTimers.phase, Run.record, ChunkWriter.close, [0]

    def enter(name: str) -> None:
        entries[0] += name == blow.phase
        if name == (blow.phase if blow.phase != "write" else "update") and entries[0] == blow.entry:
            blow.strike()

    @contextlib.contextmanager
    def phase(self: PhaseTimers, name: str, *, swallow: bool = False) -> Iterator[None]:
        with real_phase(self, name, swallow=swallow):
            enter(name)
            yield

    def record(self: Run, step: int) -> None:
        enter("record")
        real_record(self, step)

    def close(self: ChunkWriter) -> FileRecord:
        if blow.phase == "write" and entries[0] < blow.entry:
            entries[0] += 1
            if entries[0] == blow.entry:
                raise RuntimeError("planted in the writer")
        return real_close(self)

    PhaseTimers.phase, Run.record, ChunkWriter.close = phase, record, close


def train_under(
    rank: int, world_size: int, overrides: Sequence[str], blow: Blow, program: Callable[..., str | None] = train
) -> str | None:
    """Run one rank of the program; return the reason if it was stopped."""
    if rank in (blow.rank, *blow.others):
        expect(blow)
    try:
        return program(rank, world_size, overrides)
    except Preempted as reason:
        return f"preempted: {reason}"


def kill(world_size: int, overrides: Sequence[str], blow: Blow) -> str:
    """Run until the blow kills a rank and the others fail; return their output ("" if the run ended before it)."""
    try:
        errors = run_ranks(train_under, world_size, overrides, blow, timeout=170)
    except AssertionError as failure:
        killed = [f"rank {rank} was killed by SIGKILL" for rank in (blow.rank, *blow.others)]
        assert any(line in str(failure) for line in killed), failure
        return str(failure)
    assert errors == [None] * world_size, errors
    return ""


def read_rollouts(run_dir: Path) -> dict[str, bytes]:
    """Rollout files by name."""
    return {path.name: path.read_bytes() for path in sorted((run_dir / "rollouts").iterdir())}


def same_files(run_dir: Path, names: Sequence[str]) -> dict[str, Any]:
    """Content of some files, to see that they are left alone."""
    return {name: (run_dir / name).read_bytes() for name in names}
