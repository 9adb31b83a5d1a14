# SPDX-License-Identifier: Apache-2.0
"""Event simulation of a schedule: engines, training and weight updates.

Prompt i may begin once i < (version + 1 + k) B, where version counts updates, k is `max_staleness` and B the prompts
per batch. With `order: stream`, batch n is prompts nB to nB + B - 1, and staleness is at most k. With `order: whole`, a
batch is any B prompts whose responses are finished; half as many begin ahead, and the same bound holds
(`rollout.phase_ends`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_rl.rollout.generation import assign_engines
from tools.planning.engine_clock import EngineClock, EngineModel, Response
from tools.planning.lengths import LengthModel

_SEED = 1


@dataclass(frozen=True)
class Schedule:
    """When samples are generated, and with which weights.

    Attributes:
        max_staleness: in updates.
        updates: "in_flight": running responses continue with the new weights; "drain": the update waits for all prompts
            that may begin.
        own_ranks: whether engines and training are on different ranks.
        dispatch: as `rollout.dispatch`; a response stays on its engine.
    """

    max_staleness: int = 0
    updates: Literal["drain", "in_flight"] = "in_flight"
    order: Literal["stream", "whole"] = "stream"
    own_ranks: bool = False
    dispatch: Literal["groups", "samples"] = "samples"


@dataclass(frozen=True)
class Costs:
    """Sizes and costs of a job.

    Attributes:
        batch_size, group_size: prompts per batch, responses per prompt.
        prompt_tokens, longest: per prompt; at most per response.
        train: seconds of a batch by response tokens.
        switch_seconds: pause at an update.
    """

    engine: EngineModel
    num_engines: int
    batch_size: int
    group_size: int
    prompt_tokens: int
    longest: int
    train: Callable[[int], float]
    switch_seconds: float


@dataclass(frozen=True)
class ScheduleTimes:
    """Means over steps.

    Attributes:
        rollout_seconds: part in which training waits for samples.
        engine_idle: idle share of generation time.
        trainer_idle: idle share of training-only ranks; `None` if colocated.
        staleness_mean, staleness_max: updates from a response's first token to its training.
        carried_tokens: of unfinished responses at an update.
    """

    seconds: float
    rollout_seconds: float
    engine_idle: float
    trainer_idle: float | None
    staleness_mean: float
    staleness_max: int
    carried_tokens: float


def simulate(schedule: Schedule, costs: Costs, lengths: LengthModel, *, steps: int, skip: int = 0) -> ScheduleTimes:
    """Run a schedule; means exclude the first `skip` steps."""
    run = _Run(schedule, costs, lengths)
    rows = [run.step() for _ in range(steps)][skip:]
    seconds, waited, trained, busy, carried = (
        float(np.mean([getattr(row, name) for row in rows]))
        for name in ("seconds", "waited", "trained", "busy", "carried")
    )
    ages = np.concatenate([row.ages for row in rows])
    available = seconds if schedule.own_ranks else waited  # for generation
    return ScheduleTimes(
        seconds,
        waited,
        1 - busy / costs.num_engines / available if available else 0.0,
        1 - trained / seconds if schedule.own_ranks else None,
        float(ages.mean()),
        int(ages.max()),
        carried,
    )


@dataclass(frozen=True)
class _Step:
    """The results of a step: seconds in total, of waiting for samples, of training and of engines, and more.

    Staleness of each response (`ages`), and tokens of unfinished responses (`carried`).
    """

    seconds: float
    waited: float
    trained: float
    busy: float
    ages: np.ndarray
    carried: int


class _Run:
    """The state between steps."""

    def __init__(self, schedule: Schedule, costs: Costs, lengths: LengthModel) -> None:
        self._schedule, self._costs, self._lengths = schedule, costs, lengths
        self._engines = [EngineClock(costs.engine, costs.prompt_tokens) for _ in range(costs.num_engines)]
        self._groups: dict[int, list[Response]] = {}  # admitted, not trained on yet; in order
        self._missing: dict[int, int] = {}  # unfinished responses of incomplete groups
        self._num_whole = 0  # complete groups
        self._num_due = 0  # incomplete groups that must be in the batch
        self._ahead = schedule.max_staleness * costs.batch_size
        self._passed = self._ahead // 2 if schedule.order == "whole" else 0
        self._drawn: tuple[int, list[list[int]]] = (-1, [])  # batch number, its lengths
        self._num_open = self._version = 0
        self._now = 0.0

    def step(self) -> _Step:
        """Collect a batch, train, update."""
        costs, engines, is_colocated = self._costs, self._engines, not self._schedule.own_ranks
        start, busy = self._now, self._count_busy()
        self._open_gate()
        for engine in engines:  # running responses finish a pass, even if the batch is complete
            self._finish(engine.run_past(np.nextafter(engine.now, np.inf)))
        self._run_until(lambda: self._num_whole >= costs.batch_size and not self._num_due)
        batch = self._take_batch()
        ages = np.array([self._version - response.version for response in batch])
        seconds = costs.train(sum(response.length for response in batch))
        drains = self._schedule.updates == "drain"
        if is_colocated and drains:
            self._run_until(lambda: not self._missing)
        else:
            self._settle(self._now)
        collected, trained = self._now, self._now + seconds
        if not is_colocated:
            for engine in engines:  # engines synchronize, and resume with an empty cache
                engine.interrupt()
                engine.fill()
            self._run_until(lambda: drains and not self._missing, np.inf if drains else trained)
        carried = sum(engine.count_tokens() for engine in engines)
        for engine in engines:
            engine.interrupt()
        self._now = max(self._now, trained) + costs.switch_seconds
        self._version += 1
        for engine in engines:
            engine.begin(self._now, self._version)
        return _Step(self._now - start, collected - start, seconds, self._count_busy() - busy, ages, carried)

    def _count_busy(self) -> float:
        return sum(engine.busy for engine in self._engines)

    def _open_gate(self) -> None:
        """Start the prompts that may now begin."""
        costs, begun = self._costs, []
        for ordinal in range(self._num_open, self._find_due() + self._ahead):
            self._groups[ordinal] = [Response(ordinal, length) for length in self._draw(ordinal)]
            self._missing[ordinal] = costs.group_size
            begun += self._groups[ordinal]
        self._num_open += len(begun) // costs.group_size
        self._num_whole = len(self._groups) - len(self._missing)
        self._num_due = sum(ordinal < self._find_due() for ordinal in self._missing)
        loads = np.array([engine.num_unfinished for engine in self._engines])
        prompts = [costs.prompt_tokens] * (len(begun) // costs.group_size)
        engine_of = assign_engines(
            self._schedule.dispatch, prompts, costs.group_size, costs.num_engines, costs.longest, loads
        )
        for response, number in zip(begun, engine_of.tolist(), strict=True):
            self._engines[number].queue.append(response)
        for engine in self._engines:
            engine.fill()

    def _find_due(self) -> int:
        """Return the number of the first prompt that the next batch does not wait for."""
        return (self._version + 1) * self._costs.batch_size - self._passed

    def _draw(self, ordinal: int) -> list[int]:
        costs, (number, place) = self._costs, divmod(ordinal, self._costs.batch_size)
        if number != self._drawn[0]:
            first = number * costs.batch_size
            rows = self._lengths.draw(_SEED, first, costs.batch_size, costs.group_size, costs.longest)
            self._drawn = number, rows.tolist()
        return self._drawn[1][place]

    def _run_until(self, is_done: Callable[[], bool], end: float = np.inf) -> None:
        """Run the engines until `is_done` or, finishing their pass, until `end`."""
        events = [(engine.next_event(), number) for number, engine in enumerate(self._engines) if engine.is_running]
        heapq.heapify(events)
        while not is_done() and events and events[0][0] <= end:
            self._now, number = events[0]
            self._finish(self._engines[number].run_to_event())
            if self._engines[number].is_running:
                heapq.heapreplace(events, (self._engines[number].next_event(), number))
            else:
                heapq.heappop(events)
        if end < np.inf:
            self._settle(end)

    def _settle(self, time: float) -> None:
        """Finish each engine's pass."""
        for engine in self._engines:
            self._finish(engine.run_past(time))
        self._now = max(time, *(engine.now for engine in self._engines))

    def _finish(self, responses: list[Response]) -> None:
        for response in responses:
            self._missing[response.ordinal] -= 1
            if not self._missing[response.ordinal]:
                del self._missing[response.ordinal]
                self._num_whole += 1
                self._num_due -= response.ordinal < self._find_due()

    def _take_batch(self) -> list[Response]:
        """Remove and return the first complete prompts' responses."""
        whole = [ordinal for ordinal in self._groups if ordinal not in self._missing][: self._costs.batch_size]
        assert len(whole) == self._costs.batch_size, "every prompt that may begin is finished in the end"
        return [response for ordinal in whole for response in self._groups.pop(ordinal)]
