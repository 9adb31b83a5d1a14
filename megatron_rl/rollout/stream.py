# SPDX-License-Identifier: Apache-2.0
"""Samples of bounded staleness: begun ahead of their step, carried over phases, and never dropped.

No response begins with weights more than `schedule.max_staleness` steps older than the weights trained on it, and every
prompt is trained on once (the rule: `rollout.phase`).

Unfinished samples keep tokens, log-probs and policy versions and continue on their engine in the next phase. Seeds
depend on the position in the data order and the number of existing tokens, not on the engine or the time of an
interruption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompts import PromptBatches
from megatron_rl.engines.protocol import SamplingConfig
from megatron_rl.parallel.collectives import open_store, world
from megatron_rl.rollout.episodes import describe_episodes
from megatron_rl.rollout.generation import OnFinished, RolloutGenerator
from megatron_rl.rollout.order import SampleOrder
from megatron_rl.rollout.phase import (
    AfterSteps,
    Phase,
    PhaseEnd,
    PhaseTarget,
    ScheduleTrace,
    TrainingEnd,
    find_window,
    open_phase_end,
    read_trace,
)
from megatron_rl.types import Prompt, Rollout, UserError


@dataclass(frozen=True)
class Taken:
    """Complete groups that a step takes; dynamic sampling may drop some later.

    Attributes:
        prompts: equal on every rank.
        steps: training step of each prompt, if none is dropped.
        rollouts: (prompt index, rollout) of this rank's engine.
    """

    prompts: list[Prompt]
    steps: list[int]
    rollouts: list[tuple[int, Rollout]]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Clock:
    """End conditions of generation: `training` beside training (unless steps are counted or replayed), else `end`."""

    end: PhaseEnd
    training: TrainingEnd | None = None
    trace: ScheduleTrace = field(default_factory=ScheduleTrace)


class RolloutStream:
    """Samples of a run in data order, which may begin before their step; every rank makes the same calls.

    Attributes:
        runs_ahead: dedicated engines generate during training.
    """

    def __init__(
        self, generator: RolloutGenerator, order: SampleOrder, config: RunConfig, clock: Clock, group: dist.ProcessGroup
    ) -> None:
        self._generator, self._order, self._clock, self._group = generator, order, clock, group
        self._carried = generator.open(order)
        self.runs_ahead = clock.training is not None
        self._schedule, self._rollout, self._agents = config.schedule, config.rollout, config.agents
        self._drains = config.schedule.updates == "drain"
        self._batch_size, self._group_size = config.data.train_batch_size, order.group_size
        self._step = 0  # step of the last phase
        self._open: list[int] = []  # positions of begun, untaken prompts

    def next_batch(self) -> list[Prompt] | None:
        """Return a step's prompts if none may begin or has begun ahead, else `None`: `take` is to be called."""
        return None if self._schedule.max_staleness > 0 or self._open else next(self._order.prompts)

    def take(
        self, sampling: SamplingConfig, on_finished: OnFinished | None, count: int | None = None, round: int = 0
    ) -> Taken:
        """Generate until the next groups are complete, and take them; collective.

        Args:
            on_finished: called on an engine's first rank; given on every rank or on none.
            count: prompts to take; `data.train_batch_size` if `None`.
            round: number of earlier calls in the step. Later rounds generate only if too few groups are complete.

        Raises:
            Exception: as `RolloutGenerator.run`.
        """
        self._step += round == 0
        wanted, ahead = count or self._batch_size, self._schedule.max_staleness * self._batch_size
        passed = ahead // 2 if self._schedule.order == "whole" else 0
        needed, new = find_window(self._open, self._order.prompts.position, wanted, ahead, passed)
        self._begin(new, sampling.max_tokens)
        self._order.prompts.advance(len(new))
        self._open += new
        left = self._count_unfinished()
        held, holders, missing = np.split(
            self._sum_over_engines([len(self._carried.keys), *(left > 0), *left]), [1, 1 + len(left)]
        )
        assert held == len(left) * self._group_size, f"{held} samples of {len(left)} prompts have begun"
        target = PhaseTarget(needed, wanted, left, holders)
        generates = round == 0 or not target.is_reached(missing)
        awaited = needed if needed == wanted else len(left)
        keys = self._carried.keys
        if self._drains and self.runs_ahead:  # other samples continue during training
            positions = {*self._open[:awaited]}
            keys = [key for key in keys if key // self._group_size in positions]
        busy_share = None
        if generates:
            name = f"rollout {round}" if round else "rollout"
            end = self._clock.trace.find_end(self._step, name) or self._clock.end
            self._carried.start(keys, sampling)
            phase = Phase(self._open[:awaited], left, None if self._drains else end)
            self._clock.end.begin(target)
            self._run(phase, on_finished, int(missing[:awaited].sum()), name)
            missing, busy_share = self._sum_over_engines(self._count_unfinished()), phase.busy_share()
        chosen = np.flatnonzero(missing == 0)[:wanted].tolist()  # the needed ones, then other complete ones
        assert len(chosen) == wanted, f"{len(chosen)} of {wanted} prompts are whole"
        return self._hand_out([self._open[group] for group in chosen], busy_share)

    def _hand_out(self, positions: Sequence[int], busy_share: float | None) -> Taken:
        keys = [position * self._group_size + sample for position in positions for sample in range(self._group_size)]
        held = {*self._carried.keys}
        rollouts = [
            (number // self._group_size, self._carried.rollout(key)) for number, key in enumerate(keys) if key in held
        ]
        self._carried.drop(keys)
        self._open = sorted({*self._open} - {*positions})
        counts, found = self._carried.counts, [len(self._carried.keys), self._carried.num_tokens, busy_share or 0.0]
        carried, tokens, busy, *sums = self._sum_over_engines([*found, *counts.values()]).tolist()
        metrics = {"schedule/carried": carried, "schedule/carried_tokens": tokens} | self._generator.metrics
        metrics |= describe_episodes(dict(zip(counts, sums, strict=True)))
        counts.update(dict.fromkeys(counts, 0.0))
        if busy_share is not None:
            metrics["schedule/engine_busy"] = busy / len(self._generator.engines.of)
        prompts = [self._order.prompts.prompt(position) for position in positions]
        steps = [self._order.step_of(position * self._group_size) for position in positions]
        return Taken(prompts, steps, rollouts, metrics)

    def _count_unfinished(self) -> np.ndarray:
        """Count this engine's unfinished samples of each open (begun, untaken) prompt, [open prompts]."""
        counts = Counter(key // self._group_size for key in self._carried.find_unfinished())
        return np.array([counts[position] for position in self._open], np.int64)

    def run_ahead(self, sampling: SamplingConfig, on_finished: OnFinished | None) -> None:
        """Continue begun samples on dedicated engines until rank 0 signals that training ends; collective as `take`."""
        training, name = self._clock.training, "beside training"
        assert training is not None
        training.begin()
        if self._group.rank() == 0:
            training.signal()
        every = self._schedule.steps_per_update
        end = self._clock.trace.find_end(self._step, name) or (training if every is None else AfterSteps(every))
        self._carried.start(self._carried.keys, sampling)
        self._run(Phase([], np.empty(0), None if self._drains else end), on_finished, None, name)

    def _run(self, phase: Phase, on_finished: OnFinished | None, total: int | None, name: str) -> None:
        self._generator.run(self._carried, phase, on_finished, total)
        self._clock.trace.write(self._step, name, phase.num_steps)

    def _begin(self, positions: range, max_tokens: int) -> None:
        loads = np.zeros(len(self._generator.engines.of))
        loads[self._generator.engine_index] = len(self._carried.find_unfinished())
        loads = self._sum_over_engines(loads).astype(np.int64)
        prompts = [self._order.prompts.prompt(position) for position in positions]
        mine = self._generator.assign(prompts, self._group_size, max_tokens, loads)
        self._carried.begin([positions.start * self._group_size + key for key in mine])

    def _sum_over_engines(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        total = torch.zeros(len(values), dtype=torch.float64)
        if self._generator.is_first:
            total += torch.as_tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return total.numpy()

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the number of open (begun, untaken) prompts, whose samples are in `rank_state`.

        They are the last prompts that began, without `taken`: prompts taken out of order (`order: whole`).
        """
        begun = self._order.prompts.position
        span = range(min(self._open, default=begun), begun)
        return {
            "step": self._step,
            "open": len(self._open),
            "taken": sorted({*span} - {*self._open}),
            "group_size": self._group_size,
            "order": self._schedule.order,
            "truncated": self._rollout.is_truncated,
            "episodes": self._agents.has_episodes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, after the state of the prompts.

        Raises:
            UserError: prompts have begun, and the group size has changed, `order` has become `whole`, truncated
                sampling was switched off, or episodes and plain responses were exchanged.
        """
        group_size, taken = state["group_size"], state.get("taken", [])
        if state["open"] and group_size != self._group_size:
            raise UserError(
                f"rollout.n = {self._group_size}, and {state['open']} prompts have begun with {group_size} responses "
                "each",
                source="rollout.n",
                expected=str(group_size),
                hint="keep it, or start a new run from the checkpoint's weights",
            )
        if state["open"] and (self._schedule.order, state.get("order", "stream")) == ("whole", "stream"):
            raise UserError(
                f"schedule.order = whole, and {state['open']} prompts have begun that can no longer be passed over",
                source="schedule.order",
                expected="stream",
                hint="keep it, or start a new run from the checkpoint's weights",
            )
        if state["open"] and state.get("truncated", False) and not self._rollout.is_truncated:
            raise UserError(
                f"sampling is not truncated, and {state['open']} prompts have begun with truncated sampling",
                source="rollout.top_p, rollout.top_k and rollout.min_p",
                expected="one of them, as before",
                hint="keep it, or start a new run from the checkpoint's weights",
            )
        if state["open"] and state.get("episodes", False) != self._agents.has_episodes:
            kinds = ("responses", "episodes")
            was, now = kinds[state.get("episodes", False)], kinds[self._agents.has_episodes]
            raise UserError(
                f"the section agents now selects {now}, and {state['open']} prompts have begun as {was}",
                source="agents.environment, agents.tools and agents.program",
                expected="one of them, or none, as before",
                hint="keep them, or start a new run from the checkpoint's weights",
            )
        begun, self._step = self._order.prompts.position, state.get("step", 0)
        self._open = sorted({*range(begun - state["open"] - len(taken), begun)} - {*taken})

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Return the samples of this rank's engine on its first rank, else nothing."""
        if not self._carried.keys or not self._generator.is_first:
            return {}
        place = torch.tensor([self._generator.engine_index, len(self._generator.engines.of)])
        return self._carried.pack() | {"engine": place}

    def load_rank_states(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Load the samples of all ranks: on their previous engines, or evenly if the number of engines has changed."""
        mine, num_engines = self._generator.engine_index, len(self._generator.engines.of)
        unit = self._group_size if self._rollout.dispatch == "groups" else 1
        self._carried.drop(self._carried.keys)
        for state in states:
            engine, of = state["engine"].tolist()

            def is_mine(key: int, engine: int = engine, of: int = of) -> bool:
                return (engine if of == num_engines else key // unit % num_engines) == mine

            self._carried.load(state, is_mine)


def open_stream(
    generator: RolloutGenerator,
    prompts: PromptBatches[Prompt],
    config: RunConfig,
    *,
    is_apart: bool,
    timeout: timedelta | None,
    trace: Path | None,
) -> RolloutStream:
    """Build the stream; collective.

    Args:
        is_apart: the engines have dedicated ranks.
        trace: output directory of the schedule trace, if any.

    Raises:
        UserError: the trace to replay is missing or has other engines; on every rank.
    """
    schedule, engines, replayed = config.schedule, generator.engines.of, None
    every, begins_ahead = schedule.steps_per_update, schedule.max_staleness > 0
    end = open_phase_end(every, engines, timeout)
    training = TrainingEnd(open_store("training", world())) if is_apart and begins_ahead else None
    if schedule.replay is not None:
        replayed = read_trace(Path(schedule.replay), len(engines))
    is_timed = begins_ahead and schedule.updates == "in_flight" and every is None
    mine = generator.engine_index if generator.is_first else None
    clock = Clock(end, training, ScheduleTrace(len(engines), mine, trace if is_timed else None, replayed))
    return RolloutStream(generator, SampleOrder(prompts, config), config, clock, world())
