# SPDX-License-Identifier: Apache-2.0
"""Positions of ranks: step, phase and current operation of the main thread, read by another thread.

The thread's frames show the collective in which it waits, its ranks, and the caller; nothing is recorded in advance.
All ranks enter the same phases in the same order, so a rank that entered fewer is behind.
"""

from __future__ import annotations

import json
import linecache
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_rl.observability.timers import PhaseTimers

_PACKAGE = "megatron_rl"
_DISTRIBUTED = "torch.distributed"
_WAITING = (_DISTRIBUTED, "megatron_rl.parallel.pairs")  # modules in which a rank waits for other ranks
_COLLECTIVES = "megatron_rl.parallel.collectives"  # its callers are reported instead
_SHOWN = 3  # of the last collectives of a late rank, in a report


@dataclass(frozen=True)
class Position:
    """Place of a rank in the program.

    Attributes:
        operation: current collective ("all_reduce", "wait"), if any.
        ranks: members of its group; `None` if unknown.
        caller: file, line and function in this package, else the innermost frame.
        seconds: time since this place was first observed.
        looks: observations so far; constant when the process is gone or stopped.
        is_closed: the rank has left in good order.
        recent: last collectives, the newest last; set when a job ends.
        memory: bytes at the end of its last phase; 0 if not measured.
    """

    rank: int
    step: int
    phase: str
    num_entered: int
    operation: str | None
    ranks: tuple[int, ...] | None
    caller: str
    seconds: float
    looks: int
    is_closed: bool = False
    recent: tuple[str, ...] = ()
    memory: int = 0

    def encode(self) -> str:
        """Return the position as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: bytes | str) -> Position:
        """Parse JSON of `encode`."""
        fields: dict[str, Any] = json.loads(text)
        ranks, recent = fields["ranks"], tuple(fields["recent"])
        return Position(**fields | {"ranks": None if ranks is None else tuple(ranks), "recent": recent})

    def describe(self) -> str:
        """Return one line of a report."""
        group = "" if self.ranks is None else f" of ranks {_short(self.ranks)}"
        doing = f"waits in {self.operation}{group}" if self.operation else "is in no collective"
        where = f"step {self.step}, phase {self.phase}"
        return f"rank {self.rank}: {where}: {doing} for {self.seconds:.0f} s ({self.caller})"


def find_place(frame: FrameType) -> tuple[str | None, tuple[int, ...] | None, str]:
    """Return `operation`, `ranks` and `caller` of a `Position`, given the innermost frame of a thread."""
    operation, ranks = None, None
    outer: FrameType | None = frame
    while outer is not None and _module(outer).startswith(_WAITING):
        name = outer.f_code.co_name
        operation = operation if name in ("wrapper", "func_wrapper") else name
        ranks = ranks or _ranks_of(outer)
        outer = outer.f_back
    if operation is None and ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0):
        operation = "wait"
    caller = outer
    while caller is not None and (not _module(caller).startswith(_PACKAGE) or _module(caller) == _COLLECTIVES):
        caller = caller.f_back
    caller = caller or outer or frame
    where = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno} in {caller.f_code.co_name}"
    return operation, ranks, where


def find_position(rank: int, timers: PhaseTimers, thread: int) -> Position | None:
    """Return this rank's position with `seconds` and `looks` 0, or `None` if its main thread is gone."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    phases = [name for name in timers.phases if name != "step"]
    return Position(
        rank,
        timers.step,
        phases[-1] if phases else "between phases",
        timers.num_entered,
        *find_place(frame),
        seconds=0.0,
        looks=0,
    )


def explain(positions: Sequence[Position | None], silent: Sequence[int]) -> str:
    """Return a report of the ranks that wait and the late ranks that they wait for.

    Args:
        positions: position of each rank, `None` if it did not answer.
        silent: ranks whose process is gone or stopped.
    """
    known = [p for p in positions if p is not None]
    first = min((p.num_entered for p in known), default=0)
    late = {p.rank for p in known if p.num_entered == first and p.operation is None} | set(silent)
    if not late and len({p.num_entered for p in known}) > 1:
        late = {p.rank for p in known if p.num_entered == first}
    waiting = [p for p in known if p.rank not in late]
    if late and waiting:
        at = max(waiting, key=lambda p: p.seconds)
        those = name_ranks(sorted(p.rank for p in waiting))
        verdict = (
            f"{those} waited for {name_ranks(sorted(late))} in step {at.step}, "
            f"phase {at.phase}, {at.operation or at.caller}"
        )
    else:
        verdict = "all ranks wait, in different collectives or for a message that was never sent"
    lines = {p.rank: [p.describe(), *(f"  {line}" for line in p.recent[-_SHOWN:] if p.rank in late)] for p in known}
    lines |= {rank: [f"rank {rank}: no answer; its process is gone or stopped"] for rank in silent}
    return "\n  ".join([verdict, *(line for rank in sorted(lines) for line in lines[rank])])


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _ranks_of(frame: FrameType) -> tuple[int, ...] | None:
    """Return the global ranks of a collective's group."""
    distributed = sys.modules[_DISTRIBUTED]
    values = frame.f_locals
    if "group" not in values and "pg" not in values:
        return None
    try:
        group = values.get("group") or values.get("pg") or distributed.group.WORLD
        return tuple(distributed.get_process_group_ranks(group))
    except (KeyError, RuntimeError, TypeError, ValueError):  # not a group, or one that is being destroyed
        return None


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-3,6"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_short(ranks)}"


def _short(ranks: Sequence[int]) -> str:
    """Return runs of numbers: "0-3,6"."""
    pairs = groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])  # constant along a run
    runs = [[rank for _, rank in run] for _, run in pairs]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
