# SPDX-License-Identifier: Apache-2.0
"""What a phase of generation waits for, and when it ends for all engines: every one of them has what the step needs.

An engine that is done keeps generating for later steps. How it learns that the others are done decides what is
reproducible: with `StepCount` all engines end at the same multiple of decode steps, with `ByStore` as soon as it is so.

Which prompts of the data order may begin, and which of those that have begun a step takes, is a rule of numbers.
With max_staleness k and B prompts per step, no prompt is learned from more than k steps after the one in which it may
begin. Let a step that has taken c prompts so far, and needs n more, have the number s = c + n: B at first, B more in
every further step, and more where dynamic sampling drops prompts. Prompt i may begin once i < s + k B - p; once
i < s - p it must be taken. The second holds k steps after the first at the latest. Prompts that must be taken never
outnumber those that are needed: s grows by what is needed from call to call.

`schedule.order: stream` has p = 0: a step takes the next prompts. `whole` has p = k B / 2: a step takes what must be
taken, and others whose responses are all there. As k B - p prompts are ahead at the end of a step, the mean staleness
is k - p / B: half the bound with `whole`. With p = 0 it is the bound, so that no prompt can be passed over within it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megatron_rl.parallel.collectives import align_group_names, make_group, open_store, world
from megatron_rl.rollout.episodes import Following
from megatron_rl.rollout.serving import ControlMessage

_POLL_SECONDS = 0.02
_LONGEST_POLL_SECONDS = 0.1
_FAILURE_SECONDS = 1.0  # an engine whose own part is missing looks only for the failure of another one
_IDLE_SECONDS = 0.002
T = TypeVar("T")
R = TypeVar("R")


def find_window(open_: Sequence[int], begun: int, wanted: int, ahead: int, passed: int) -> tuple[int, range]:
    """How many of the prompts that are open must be taken next, and which ones begin.

    Args:
        open_: positions in the data order of those that have begun and were not taken, in order.
        begun: prompts that have begun.
        wanted: prompts that the step needs.
        ahead: prompts that may begin before their step, k B.
        passed: of them, those that may be passed over.

    Returns:
        The first so many of `open_` and the new ones; and the positions of the new ones.
    """
    end = begun - len(open_) + wanted - passed
    new = range(begun, max(begun, end + ahead))
    return min(wanted, sum(position < end for position in [*open_, *new])), new


@dataclass(frozen=True)
class Goal:
    """What a phase waits for.

    Attributes:
        needed: the first so many groups.
        wanted: groups that are whole, those included.
        left: [groups] samples that this engine has to finish.
        holders: [groups] engines with samples to finish.
    """

    needed: int
    wanted: int
    left: np.ndarray
    holders: np.ndarray

    def is_reached(self, left: np.ndarray) -> bool:
        """Whether it is, with so many samples of each group to finish on all engines."""
        return not left[: self.needed].any() and int(np.count_nonzero(left == 0)) >= self.wanted

    def choose(self, left: np.ndarray) -> list[int]:
        """The groups that are taken then: the needed ones, and the first others that are whole."""
        return np.flatnonzero(left == 0)[: self.wanted].tolist()


class PhaseEnd(Protocol):
    """Asked by the first rank of each engine, before each of its steps."""

    def begin(self, goal: Goal) -> None:
        """A phase begins; the same calls on every rank."""

    def is_over(self, left: np.ndarray) -> bool:
        """Whether the phase is over; `left`: [groups] samples that this engine has to finish."""
        ...

    def give_up(self) -> None:
        """This engine takes no further step: the phase is over for all."""


class ByStore:
    """By the clock: the engines count what is finished in a store; those that are done look fifty times a second.

    An engine counts itself once it has finished the needed groups. Of the others, where any of them may do, it counts
    itself for each that it has finished its samples of: the last one to do so counts the group.

    Args:
        store: shared by the first ranks of all engines.
        num_engines: to wait for.
    """

    def __init__(self, store: Store, num_engines: int) -> None:
        self._store, self._num_engines = store, num_engines
        self._phase = 0
        self._mine: set[str] = set()  # keys of the phase that this engine was the first to count with

    def begin(self, goal: Goal) -> None:
        """A phase begins; nobody counts for the one before any more."""
        for key in self._mine:
            self._store.delete_key(key)
        self._mine.clear()
        self._phase += 1
        self._goal, self._left = goal, goal.left
        self._missing = goal.wanted - goal.needed - int(np.count_nonzero(goal.holders[goal.needed :] == 0))
        self._is_told = self._is_over = False
        self._looked = 0.0

    def is_over(self, left: np.ndarray) -> bool:
        """Tell the others what is finished; look whether that is enough."""
        has_news = False
        if not self._is_told and not left[: self._goal.needed].any():
            self._is_told = has_news = True
            self._count("engines")
        if self._missing > 0:
            for group in np.flatnonzero((left == 0) & (self._left > 0)).tolist():
                if group >= self._goal.needed and self._count(f"group {group}") == self._goal.holders[group]:
                    has_news = True
                    self._count("groups")
            self._left = left.copy()
        if has_news and self._is_enough():
            self.give_up()
        period = _POLL_SECONDS if self._is_told else _FAILURE_SECONDS
        if not self._is_over and time.monotonic() - self._looked >= period:
            self._is_over = self._count("over", 0) > 0
            self._looked = time.monotonic()
        return self._is_over

    def give_up(self) -> None:
        """Count for all engines."""
        self._count("over")
        self._is_over = True

    def _is_enough(self) -> bool:
        return self._count("engines", 0) >= self._num_engines and (
            self._missing <= 0 or self._count("groups", 0) >= self._missing
        )

    def _count(self, name: str, count: int = 1) -> int:
        key = f"phase {self._phase} {name}"
        found = self._store.add(key, count)
        if found == count:
            self._mine.add(key)
        return found


class StepCount:
    """By decode steps: after every so many of them the engines wait for each other.

    Args:
        every: steps.
        group: of the first ranks of all engines; None: there is one engine.
    """

    def __init__(self, every: int, group: dist.ProcessGroup | None) -> None:
        self._every, self._group = every, group

    def begin(self, goal: Goal) -> None:
        """A phase begins."""
        self._steps, self._goal = 0, goal

    def is_over(self, left: np.ndarray) -> bool:
        """False between the multiples."""
        self._steps += 1
        return self._steps % self._every == 0 and self._meet(left, 0)

    def give_up(self) -> None:
        """Meet the others at their next multiple."""
        self._meet(np.zeros_like(self._goal.left), 1)

    def _meet(self, left: np.ndarray, failures: int) -> bool:
        found = torch.tensor([*left, failures])
        if self._group is not None:
            dist.all_reduce(found, group=self._group)
        return bool(found[-1]) or self._goal.is_reached(found[:-1].numpy())


class TrainingEnd:
    """The end of training beside which engines on ranks of their own generate: told by one rank, looked for by them.

    Args:
        every: decode steps of each engine in that time, reproducible; None: until training has ended.
        store: shared by all ranks.
    """

    def __init__(self, every: int | None, store: Store) -> None:
        self._every, self._store = every, store
        self._number = self._steps = 0

    def begin(self) -> None:
        """Training may end from now on."""
        self._number += 1
        self._steps, self._next_look = 0, 0.0
        self._begun = time.monotonic()

    def tell(self) -> None:
        """It has ended."""
        self._store.add(f"trained {self._number}", 1)

    def is_over(self, left: np.ndarray) -> bool:
        """Whether it has, or the steps are made; whatever there is left to do."""
        self._steps += 1
        if self._every is not None:
            return self._steps > self._every
        now = time.monotonic()
        if now < self._next_look:
            return False
        # Looking takes half a millisecond: the longer it has lasted, the less it matters to be late.
        self._next_look = now + min(max(_POLL_SECONDS, (now - self._begun) / 50), _LONGEST_POLL_SECONDS)
        return self._store.add(f"trained {self._number}", 0) > 0

    def give_up(self) -> None:
        """Nobody waits for an engine here."""


class Phase:
    """What the first rank of an engine orders from the beginning of a phase to its end.

    Args:
        awaited: positions of the first prompts, which the step may take.
        left: [groups] samples of each prompt that this engine has to finish.
        end: of the phase; None: it drains, and ends when nothing follows.

    Attributes:
        num_steps: decode steps before its end.
    """

    def __init__(self, awaited: Sequence[int], left: np.ndarray, end: PhaseEnd | TrainingEnd | None) -> None:
        self._left, self._end = left.copy(), end
        self._places = {position: place for place, position in enumerate(awaited)}
        self.num_steps, self._has_begun = 0, False
        self._started, self._idle_seconds = time.monotonic(), 0.0

    def take(self, is_idle: bool, following: Following, running: Iterable[int]) -> ControlMessage:
        """The next message, with what comes next as far as the phase is not over; see `rollout.serving.serve`.

        Args:
            is_idle: the engine has nothing to do.
            following: what comes next.
            running: keys of the requests that the engine has.
        """
        if self._end is None:
            return ControlMessage(requests=following.requests, stop=following.is_last)
        if self._has_begun:
            if self._end.is_over(self._left):
                return ControlMessage(interrupts=sorted(running), stop=True)
            is_idle &= not following.requests
            self.num_steps += not is_idle
            if is_idle:
                time.sleep(_IDLE_SECONDS)
                self._idle_seconds += _IDLE_SECONDS
        self._has_begun = True
        return ControlMessage(requests=following.requests)

    def finish(self, position: int) -> bool:
        """A sample of a prompt is finished; whether the step may take it."""
        place = self._places.get(position)
        if place is not None:
            self._left[place] -= 1
        return place is not None

    def guard(self, call: Callable[[T], R]) -> Callable[[T], R]:
        """A callback whose error ends the phase for all engines."""

        def guarded(argument: T) -> R:
            try:
                return call(argument)
            except Exception:
                if self._end is not None:
                    self._end.give_up()
                raise

        return guarded

    def busy_share(self) -> float:
        """Of the time since the beginning, the share in which the engine had requests."""
        return 1 - self._idle_seconds / max(time.monotonic() - self._started, _IDLE_SECONDS)


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
