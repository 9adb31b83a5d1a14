# SPDX-License-Identifier: Apache-2.0
"""The stepping loop of an engine, and the end of its phases.

An engine's first rank broadcasts a control message before each step: its ranks stay in sync only if they receive the
same requests before the same step.

A phase ends on all engines at once. Finished engines keep generating for later steps. With `StepCount` all engines end
at the same multiple of decode steps, reproducibly; with `ByStore` as soon as possible.

With max_staleness k and B prompts per step, no prompt is trained on more than k steps after the one in which it may
begin. For a step that has taken c prompts so far and needs n more, let s = c + n: B at first, B more per step, and more
if dynamic sampling drops prompts. Prompt i may begin once i < s + k B - p, and must be taken once i < s - p, at most k
steps later.

`schedule.order: stream` has p = 0: a step takes the next prompts. `whole` has p = k B / 2: a step takes the prompts
that must be taken, then complete groups. As k B - p prompts are ahead at the end of a step, the mean staleness is k - p
/ B: half the bound with `whole`.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megatron_rl.engines.protocol import Request, RolloutEngine, Sampled
from megatron_rl.parallel.collectives import align_group_names, make_group, open_store, world
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.rollout.episodes import Following

if TYPE_CHECKING:
    from megatron_rl.parallel.pairs import Pair


@dataclass(frozen=True)
class ControlMessage:
    """Actions of an engine's ranks before the next step, in field order."""

    interrupts: Sequence[int] = ()  # keys of requests to abort, keeping their partial results
    requests: Sequence[Request] = ()  # requests to add, in the order of (turn, key)
    stop: bool = False  # no message follows; running requests are completed


class Channel:
    """Broadcast channel from an engine's first rank to its other ranks: 8 bytes for an empty message.

    Args:
        group: CPU group of the engine's ranks; `None` if a single rank, or every rank by itself, creates the messages.
        star: faster connections between the first and each other rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, star: Sequence[Pair] = ()) -> None:
        self._group, self._star = group, star
        self.is_first = group is None or group.rank() == 0

    def share(self, message: ControlMessage | None) -> ControlMessage:
        """Return the first rank's message; collective over the engine."""
        if self._group is None:
            assert message is not None
            return message
        payload = torch.empty(0, dtype=torch.uint8)
        if message is not None and (message.interrupts or message.requests or message.stop):
            payload = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        size = torch.tensor([len(payload)])
        self._bring(size, self._group)
        if not size:
            return ControlMessage()
        if message is None:
            payload = torch.empty(int(size), dtype=torch.uint8)
        self._bring(payload, self._group)
        return message or pickle.loads(payload.numpy().tobytes())

    def _bring(self, values: torch.Tensor, group: dist.ProcessGroup) -> None:
        if not self._star or not self._star[0].fits(values.nbytes):
            dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
            return
        for pair in self._star:
            if self.is_first:
                pair.send(values)
            else:
                pair.receive(values)


def open_channel(engines: EngineRanks, rank: int, timeout: timedelta | None = None) -> Channel:
    """Open the channel of this rank's engine; collective over the job."""
    if engines.width == 1:
        return Channel()
    align_group_names()
    from megatron_rl.parallel.pairs import open_star

    index, _ = engines.places.get(rank, (-1, 0))
    group = None if index < 0 else make_group(engines.of[index], timeout)
    return Channel(group, open_star(group, timeout) if group is not None else ())


def serve(
    engine: RolloutEngine,
    take: Callable[[bool], ControlMessage],
    on_sampled: Callable[[Sampled], None],
    channel: Channel | None = None,
    on_requests: Callable[[Sequence[Request]], None] | None = None,
) -> Exception | None:
    """Step an engine until a stop message and completion of all requests; collective over the engine's ranks.

    Args:
        take: called before each step on the first rank (without a channel on every rank, with equal results), with
            whether the engine is idle.
        on_sampled: called on every rank with each finished or interrupted result.
        on_requests: called on every rank before requests are added.

    Returns:
        The first exception of `take` or `on_sampled`, after which neither is called. All requests are interrupted, or
        completed if a stop message came first.

    Raises:
        Exception: an error of the engine; all requests are interrupted.
    """
    running: set[int] = set()
    errors: list[Exception] = []
    channel = channel or Channel()

    def take_message() -> ControlMessage:
        if not errors:
            try:
                return take(not engine.has_requests())
            except Exception as error:
                errors.append(error)
        return ControlMessage(interrupts=sorted(running), stop=True)  # after an error

    def deliver(sampled: Sequence[Sampled]) -> None:
        for one in sampled:
            running.discard(one.key)
            if not errors:
                try:
                    on_sampled(one)
                except Exception as error:  # deferred, because other ranks would wait
                    errors.append(error)

    try:
        is_last = False
        while not is_last or engine.has_requests():
            if not is_last:
                message = channel.share(take_message() if channel.is_first else None)
                is_last = message.stop
                deliver(engine.interrupt(message.interrupts) if message.interrupts else [])
                if on_requests is not None:
                    on_requests(message.requests)
                if message.requests:  # in an order independent of their arrival
                    engine.add(sorted(message.requests, key=lambda request: (request.turn, request.key)))
                    running.update(request.key for request in message.requests)
            deliver(engine.step() if engine.has_requests() else [])
    except BaseException:
        engine.interrupt(sorted(running))
        raise
    return errors[0] if errors else None


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> list[Sampled]:
    """Generate results for a batch of requests, in their order; collective over the engine's ranks."""
    found: dict[int, Sampled] = {}
    message = ControlMessage(requests=requests, stop=True)
    error = serve(engine, lambda is_idle: message, lambda sampled: found.update({sampled.key: sampled}))
    if error is not None:
        raise error
    return [found[request.key] for request in requests if request.key in found]


_POLL_SECONDS = 0.02
_LONGEST_POLL_SECONDS = 0.1
_FAILURE_SECONDS = 1.0  # poll of an unfinished engine, for failures only
_IDLE_SECONDS = 0.002
T = TypeVar("T")
R = TypeVar("R")


def find_window(open_: Sequence[int], begun: int, wanted: int, ahead: int, passed: int) -> tuple[int, range]:
    """Find the open prompts that must be taken next, and the new prompts that begin.

    Args:
        open_: ordered positions of begun, untaken prompts.
        begun: number of prompts that have begun.
        wanted: prompts that the step needs.
        ahead: prompts that may begin ahead of their step.
        passed: prompts that may be passed over.

    Returns:
        How many of the open and then the new prompts must be taken; positions of the new ones.
    """
    end = begun - len(open_) + wanted - passed
    new = range(begun, max(begun, end + ahead))
    return min(wanted, sum(position < end for position in [*open_, *new])), new


@dataclass(frozen=True)
class PhaseTarget:
    """Groups that a phase waits for."""

    needed: int  # number of leading groups that must be complete
    wanted: int  # total number of groups that must be complete
    left: np.ndarray  # [groups] this engine's unfinished samples
    holders: np.ndarray  # [groups] number of engines with unfinished samples

    def is_reached(self, left: np.ndarray) -> bool:
        """Return whether the target is reached; `left`: [groups] unfinished samples of all engines."""
        return not left[: self.needed].any() and int(np.count_nonzero(left == 0)) >= self.wanted


class PhaseEnd:
    """End condition of a phase, polled by each engine's first rank before each step."""

    def begin(self, target: PhaseTarget) -> None:
        """Begin a phase; every rank makes the same calls."""

    def is_over(self, left: np.ndarray) -> bool:
        """Return whether the phase is over; `left`: [groups] this engine's unfinished samples."""
        raise NotImplementedError

    def give_up(self) -> None:
        """End the phase for all engines after a failure; do nothing if no engine waits for another."""


class ByStore(PhaseEnd):
    """Phase end by wall clock: engines count finished work in the job's key-value store.

    A phase ends for all engines as soon as every engine has finished its samples of the first `needed` groups, and
    enough of the other, optional groups are finished by all of their `holders` for `wanted` complete groups in total.
    """

    def __init__(self, store: Store, num_engines: int) -> None:
        self._store, self._num_engines = store, num_engines
        self._phase = 0
        self._mine: set[str] = set()  # keys of the phase that this engine created

    def begin(self, target: PhaseTarget) -> None:
        """Begin a phase."""
        for key in self._mine:
            self._store.delete_key(key)
        self._mine.clear()
        self._phase += 1
        self._goal, self._left = target, target.left
        self._missing = target.wanted - target.needed - int(np.count_nonzero(target.holders[target.needed :] == 0))
        self._is_signaled = self._is_over = False
        self._looked = 0.0

    def is_over(self, left: np.ndarray) -> bool:
        """Publish finished work and return whether the phase is over."""
        has_news = False
        if not self._is_signaled and not left[: self._goal.needed].any():
            self._is_signaled = has_news = True
            self._count("engines")
        if self._missing > 0:
            for group in np.flatnonzero((left == 0) & (self._left > 0)).tolist():
                if group >= self._goal.needed and self._count(f"group {group}") == self._goal.holders[group]:
                    has_news = True
                    self._count("groups")
            self._left = left.copy()
        if (
            has_news
            and self._count("engines", 0) >= self._num_engines
            and (self._missing <= 0 or self._count("groups", 0) >= self._missing)
        ):
            self.give_up()
        period = _POLL_SECONDS if self._is_signaled else _FAILURE_SECONDS
        if not self._is_over and time.monotonic() - self._looked >= period:
            self._is_over = self._count("over", 0) > 0
            self._looked = time.monotonic()
        return self._is_over

    def give_up(self) -> None:
        """End the phase for all engines."""
        self._count("over")
        self._is_over = True

    def _count(self, name: str, count: int = 1) -> int:
        key = f"phase {self._phase} {name}"
        found = self._store.add(key, count)
        if found == count:
            self._mine.add(key)
        return found


class StepCount(PhaseEnd):
    """Phase end by decode steps: all engines synchronize after every `every` steps."""

    def __init__(self, every: int, group: dist.ProcessGroup | None) -> None:
        self._every, self._group = every, group

    def begin(self, target: PhaseTarget) -> None:
        """Begin a phase."""
        self._steps, self._goal = 0, target

    def is_over(self, left: np.ndarray) -> bool:
        """Count a decode step; return whether the phase ends; collective over engines in every `every`-th step."""
        self._steps += 1
        return self._steps % self._every == 0 and self._meet(left, 0)

    def give_up(self) -> None:
        """End the phase at the next synchronization."""
        self._meet(np.zeros_like(self._goal.left), 1)

    def _meet(self, left: np.ndarray, failures: int) -> bool:
        found = torch.tensor([*left, failures])
        if self._group is not None:
            dist.all_reduce(found, group=self._group)
        return bool(found[-1]) or self._goal.is_reached(found[:-1].numpy())


class TrainingEnd(PhaseEnd):
    """Signal that the training phase has ended: one training rank sets it, dedicated engines poll it."""

    def __init__(self, store: Store) -> None:
        self._store, self._number = store, 0

    def begin(self, target: PhaseTarget | None = None) -> None:
        """Begin a training phase."""
        self._number += 1
        self._begun, self._next_look = time.monotonic(), 0.0

    def signal(self) -> None:
        """Signal the end of training."""
        self._store.add(f"trained {self._number}", 1)

    def is_over(self, left: np.ndarray) -> bool:
        """Return whether training has ended."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        # A poll takes half a millisecond; the longer the phase, the less a late end matters.
        self._next_look = now + min(max(_POLL_SECONDS, (now - self._begun) / 50), _LONGEST_POLL_SECONDS)
        return self._store.add(f"trained {self._number}", 0) > 0


class AfterSteps(PhaseEnd):
    """End of a phase after a fixed number of decode steps per engine, reproducible."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def is_over(self, left: np.ndarray) -> bool:
        """Count a decode step; return whether it exceeds the number."""
        self._left -= 1
        return self._left < 0


class Phase:
    """Control of one engine during a phase (stretch of generation), on its first rank.

    Args:
        awaited: positions of the leading prompts, which the step may take.
        left: this engine's unfinished samples of each prompt, `awaited` first.
        end: if `None`, the phase ends when no requests follow.

    Attributes:
        num_steps: decode steps before the end.
    """

    def __init__(self, awaited: Sequence[int], left: np.ndarray, end: PhaseEnd | None) -> None:
        self._left, self._end = left.copy(), end
        self._places = {position: place for place, position in enumerate(awaited)}
        self.num_steps, self._has_begun = 0, False
        self._started, self._idle_seconds = time.monotonic(), 0.0

    def take(self, is_idle: bool, following: Following, running: Iterable[int]) -> ControlMessage:
        """Return the engine's next control message for `serve`: new requests, or the end of the phase."""
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
        """Record a finished sample of the prompt at `position`; return whether the step may take this prompt."""
        place = self._places.get(position)
        if place is not None:
            self._left[place] -= 1
        return place is not None

    def guard(self, call: Callable[[T], R]) -> Callable[[T], R]:
        """Wrap a callback so that its error ends the phase for all engines."""

        def guarded(argument: T) -> R:
            try:
                return call(argument)
            except Exception:
                if self._end is not None:
                    self._end.give_up()
                raise

        return guarded

    def busy_share(self) -> float:
        """Return the share of time in which the engine had requests."""
        return 1 - self._idle_seconds / max(time.monotonic() - self._started, _IDLE_SECONDS)


def open_phase_end(every: int | None, engines: Sequence[Sequence[int]], timeout: timedelta | None) -> PhaseEnd:
    """Create the end condition of all phases: `StepCount`, `ByStore` if `every` is `None`; collective over the job."""
    if every is None:
        return ByStore(open_store("phases", world()), len(engines))
    if len(engines) == 1:
        return StepCount(every, None)
    align_group_names()
    return StepCount(every, make_group([ranks[0] for ranks in engines], timeout))
