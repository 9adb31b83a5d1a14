# SPDX-License-Identifier: Apache-2.0
"""When a phase of generation ends for all engines: every one of them has what the step needs.

An engine that is done keeps generating for later steps. How it learns that the others are done decides what is
reproducible: with `StepCount` all engines end at the same multiple of decode steps, with `ByStore` as soon as it is so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megatron_rl.parallel.collectives import align_group_names, make_group, open_store, world

_POLL_SECONDS = 0.02


class PhaseEnd(Protocol):
    """Asked by the first rank of each engine, before each of its steps."""

    def begin(self) -> None:
        """A phase begins; the same calls on every rank."""

    def is_over(self, is_done: bool) -> bool:
        """Whether the phase is over; `is_done`: this engine has what the step needs."""
        ...

    def give_up(self) -> None:
        """This engine takes no further step: the phase is over for all."""


class ByStore:
    """By the clock: the engines count themselves in a store, and look at most fifty times a second.

    Args:
        store: shared by the first ranks of all engines.
        num_engines: to wait for.
    """

    def __init__(self, store: Store, num_engines: int) -> None:
        self._store, self._num_engines = store, num_engines
        self._phase = 0
        self._is_told = self._is_over = False
        self._looked = 0.0

    def begin(self) -> None:
        """A phase begins."""
        self._phase += 1
        self._is_told = self._is_over = False
        self._looked = 0.0

    def is_over(self, is_done: bool) -> bool:
        """Tell the others once that this engine is done; look whether all are."""
        if is_done and not self._is_told:
            self._is_told = True
            self._add(1)
        elif not self._is_over and time.monotonic() - self._looked >= _POLL_SECONDS:
            self._add(0)
        return self._is_over

    def give_up(self) -> None:
        """Count for all engines."""
        self._add(self._num_engines)

    def _add(self, count: int) -> None:
        self._is_over = self._store.add(f"phase {self._phase}", count) >= self._num_engines
        self._looked = time.monotonic()


class StepCount:
    """By decode steps: after every so many of them the engines wait for each other.

    Args:
        every: steps.
        group: of the first ranks of all engines; None: there is one engine.
    """

    def __init__(self, every: int, group: dist.ProcessGroup | None) -> None:
        self._every, self._group = every, group
        self._steps = 0

    def begin(self) -> None:
        """A phase begins."""
        self._steps = 0

    def is_over(self, is_done: bool) -> bool:
        """False between the multiples."""
        self._steps += 1
        return self._steps % self._every == 0 and self._meet(is_done, False)

    def give_up(self) -> None:
        """Meet the others at their next multiple."""
        self._meet(False, True)

    def _meet(self, is_done: bool, has_failed: bool) -> bool:
        waiting = torch.tensor([not is_done, has_failed], dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(waiting, group=self._group)
        return not waiting[0] or bool(waiting[1])


class TrainingEnd:
    """The end of training beside which engines on ranks of their own generate: told by one rank, looked for by them.

    Args:
        every: decode steps of each engine in that time, reproducible; None: until training has ended.
        store: shared by all ranks.
    """

    def __init__(self, every: int | None, store: Store) -> None:
        self._every, self._store = every, store
        self._number = self._steps = 0
        self._looked = 0.0

    def begin(self) -> None:
        """Training may end from now on."""
        self._number += 1
        self._steps, self._looked = 0, 0.0

    def tell(self) -> None:
        """It has ended."""
        self._store.add(f"trained {self._number}", 1)

    def is_over(self, is_done: bool) -> bool:
        """Whether it has, or the steps are made; whatever there is left to do."""
        self._steps += 1
        if self._every is not None:
            return self._steps > self._every
        if time.monotonic() - self._looked < _POLL_SECONDS:
            return False
        self._looked = time.monotonic()
        return self._store.add(f"trained {self._number}", 0) > 0

    def give_up(self) -> None:
        """Nobody waits for an engine here."""


def open_phase_end(every: int | None, engines: Sequence[Sequence[int]], timeout: timedelta | None) -> PhaseEnd:
    """How the engines of a job end a phase together; collective over the job.

    Args:
        every: decode steps; None: by the clock.
        engines: the ranks of each.
        timeout: of the group.
    """
    if every is None:
        return ByStore(open_store("phases", world()), len(engines))
    if len(engines) == 1:
        return StepCount(every, None)
    align_group_names()
    return StepCount(every, make_group([ranks[0] for ranks in engines], timeout))
