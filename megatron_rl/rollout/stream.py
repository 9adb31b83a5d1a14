# SPDX-License-Identifier: Apache-2.0
"""Samples of bounded staleness: begun ahead of their step, carried from phase to phase, and never dropped.

Prompt i of the data order may begin once i < (t + 1 + k) B, where t steps were taken and k is `schedule.max_staleness`;
the step after them learns from the prompts t B .. (t + 1) B - 1. Therefore no response begins with weights that are
more than k steps older than those that learn from it, every prompt is learned from once, and in the order of k = 0.
`rollout.window` has the general rule: with dynamic sampling, and with `schedule.order: whole`.

A phase ends when the batch of the step is whole. What is unfinished then keeps its tokens, their log-probs and the
version that made each of them, on the ranks of its engine, and continues there in the next phase from a prefill. Seeds
follow from the position in the data order and from the number of tokens that are there already: neither the engine
nor the time of an interruption decides what a segment draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.schema import RunConfig
from megatron_rl.data.stream import PromptBatches
from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.engines.sampling import SamplingConfig, derive_seed
from megatron_rl.rollout.carried import NOTHING, Response, pack_responses, unpack_responses
from megatron_rl.rollout.dispatch import assign_engines
from megatron_rl.rollout.generation import RolloutGenerator, count_occurrences
from megatron_rl.rollout.phase import Phase, PhaseEnd, TrainingEnd
from megatron_rl.rollout.trace import ScheduleTrace
from megatron_rl.rollout.window import Goal, find_window
from megatron_rl.types import Prompt, Rollout, UserError


@dataclass(frozen=True)
class Taken:
    """What a step learns from, or drops where it teaches nothing.

    Attributes:
        prompts: the same on every rank.
        steps: of each prompt, the one that learns from it where none is dropped.
        rollouts: of this rank's engine, with the index of their prompt.
        metrics: of the schedule, the same on every rank.
    """

    prompts: list[Prompt]
    steps: list[int]
    rollouts: list[tuple[int, Rollout]]
    metrics: dict[str, float]


class RolloutStream:
    """The samples of a run in the order of its data; the same calls on every rank.

    Args:
        generator: the engines.
        prompts: the data order; its position says how many prompts have begun.
        config: the resolved config.
        end: of a phase; asked on the first rank of each engine.
        group: all ranks.
        training: its end, where engines on ranks of their own generate beside it; None: they do not.
        trace: of the ends of phases.

    Attributes:
        runs_ahead: whether they do.
    """

    def __init__(
        self,
        generator: RolloutGenerator,
        prompts: PromptBatches[Prompt],
        config: RunConfig,
        end: PhaseEnd,
        group: dist.ProcessGroup,
        training: TrainingEnd | None = None,
        trace: ScheduleTrace | None = None,
    ) -> None:
        self._generator, self._prompts, self._end, self._group = generator, prompts, end, group
        self._training, self.runs_ahead, self._trace = training, training is not None, trace or ScheduleTrace()
        self._schedule, self._rollout, self._run_seed = config.schedule, config.rollout, config.trainer.seed
        self._batch_size, self._group_size = config.data.train_batch_size, config.rollout.n
        self._step = 0  # that the last phase belongs to
        self._open: list[int] = []  # positions of prompts that have begun, and were not taken
        self._held: dict[int, Response] = {}  # of this engine, by position * group_size + sample
        self._finished: dict[int, Rollout] = {}  # of these, what was told to a listener
        self._batch = lru_cache(maxsize=config.schedule.max_staleness + 2)(self._read_batch)

    @property
    def is_in_use(self) -> bool:
        """Whether samples are begun ahead of their step, or were and are still here."""
        return self._schedule.max_staleness > 0 or bool(self._open)

    def next_batch(self) -> list[Prompt]:
        """The next prompts of the order, for responses that begin and end in the step; the same on every rank."""
        assert not self._open, "other prompts come first"
        return next(self._prompts)

    def take(
        self,
        sampling: SamplingConfig,
        on_finished: Callable[[Rollout, int], None] | None,
        count: int | None = None,
        round: int = 0,
    ) -> Taken:
        """Generate until the next samples are whole; collective.

        Args:
            sampling: how to draw them.
            on_finished: called on the first rank of an engine with a rollout that is finished, not decoded yet, and
                the step that it belongs to (see `Taken`). Given on every rank or on none.
            count: prompts to take; None: `data.train_batch_size`.
            round: calls before this one in the step. A further one takes what is whole without generating.

        Raises:
            Exception: as `RolloutGenerator.serve`.
        """
        self._step += round == 0
        wanted, ahead = count or self._batch_size, self._schedule.max_staleness * self._batch_size
        passed = ahead // 2 if self._schedule.order == "whole" else 0
        needed, new = find_window(self._open, self._prompts.position, wanted, ahead, passed)
        self._begin(new, sampling.max_tokens)
        self._prompts.advance(len(new))
        self._open += new
        left = self._count_unfinished()
        held, holders, missing = np.split(
            self._sum_over_engines([len(self._held), *(left > 0), *left]), [1, 1 + len(left)]
        )
        assert held == len(left) * self._group_size, f"{held} samples of {len(left)} prompts have begun"
        goal = Goal(needed, wanted, left, holders)
        generates = round == 0 or not goal.is_reached(missing)
        awaited = needed if needed == wanted else len(left)
        drains = self._schedule.updates == "drain"
        keys = self._held.keys()
        if drains and self.runs_ahead:  # the others run beside training
            positions = {*self._open[:awaited]}
            keys = [key for key in keys if key // self._group_size in positions]
        name = f"rollout {round}" if round else "rollout"
        end = self._trace.find_end(self._step, name) if generates else None
        phase = Phase(self._requests(keys, sampling), self._open[:awaited], left, end or self._end, drains=drains)
        if generates:
            self._end.begin(goal)
            self._serve(phase, on_finished, int(missing[:awaited].sum()))
            self._trace.write(self._step, name, phase.num_steps)
            missing = self._sum_over_engines(self._count_unfinished())
        chosen = goal.choose(missing)
        assert len(chosen) == wanted, f"{len(chosen)} of {wanted} prompts are whole"
        return self._hand_out([self._open[group] for group in chosen], phase.busy_share() if generates else None)

    def _hand_out(self, positions: Sequence[int], busy_share: float | None) -> Taken:
        """The samples of prompts, which are not kept any more; collective."""
        keys = [position * self._group_size + sample for position in positions for sample in range(self._group_size)]
        rollouts = [
            (number // self._group_size, self._finished.pop(key, None) or self._make_rollout(key))
            for number, key in enumerate(keys)
            if key in self._held
        ]
        for key in keys:
            self._held.pop(key, None)
        self._open = sorted({*self._open} - {*positions})
        return Taken(
            [self._prompts.stream.prompt(position) for position in positions],
            [self._step_of(position * self._group_size) for position in positions],
            rollouts,
            self._describe(busy_share),
        )

    def _count_unfinished(self) -> np.ndarray:
        """Samples that this engine has to finish, [prompts that are open]."""
        counts = Counter(key // self._group_size for key, held in self._held.items() if not held.is_finished)
        return np.array([counts[position] for position in self._open], np.int64)

    def run_ahead(self, sampling: SamplingConfig, on_finished: Callable[[Rollout, int], None] | None) -> None:
        """Continue what has begun until training has ended, on ranks of the engines' own; collective.

        Arguments and errors as of `take`. Rank 0, which trains, says that it has ended.
        """
        assert self._training is not None
        self._training.begin()
        if self._group.rank() == 0:
            self._training.tell()
        drains = self._schedule.updates == "drain"
        end = self._trace.find_end(self._step, "beside training") or self._training
        phase = Phase(self._requests(self._held, sampling), [], np.empty(0), end, drains=drains)
        self._serve(phase, on_finished, None)
        self._trace.write(self._step, "beside training", phase.num_steps)

    def _serve(self, phase: Phase, on_finished: Callable[[Rollout, int], None] | None, total: int | None) -> None:
        """Generate from the beginning of a phase to its end; arguments as of `take` and `RolloutGenerator.serve`."""
        listen = phase.guard(partial(self._listen, phase, on_finished))
        self._generator.serve(phase.requests, phase.take, listen, name=self._name, total=total)

    def _requests(self, keys: Iterable[int], sampling: SamplingConfig) -> list[Request]:
        """What continues the unfinished ones of these responses, in the order of the data."""
        return [self._request(key, sampling) for key in sorted(keys) if not self._held[key].is_finished]

    def _begin(self, positions: range, max_tokens: int) -> None:
        """Give the samples of new prompts to the engines that have least to do."""
        unfinished = np.zeros(len(self._generator.engines.of))
        unfinished[self._generator.engine_index] = sum(not held.is_finished for held in self._held.values())
        engines = assign_engines(
            self._rollout.dispatch,
            [len(self._prompts.stream.prompt(position).tokens) for position in positions],
            self._group_size,
            len(unfinished),
            max_tokens,
            self._sum_over_engines(unfinished).astype(np.int64),
        )
        first = positions.start * self._group_size
        for index in np.flatnonzero(engines == self._generator.engine_index).tolist():
            self._held[first + index] = NOTHING

    def _listen(self, phase: Phase, on_finished: Callable[[Rollout, int], None] | None, sampled: Sampled) -> None:
        """Keep what an engine sampled."""
        key, held = sampled.key, self._held.get(sampled.key)
        phase.running.discard(key)
        if held is None or np.shape(sampled.tokens) != np.shape(sampled.logprobs):
            return  # what is wrong is said at the end
        self._held[key] = held = held.extend(sampled, self._generator.policy_version)
        if not held.is_finished:
            return
        if phase.finish(key // self._group_size):
            self._generator.count(len(held.tokens))
        if on_finished is not None and self._generator.is_first:
            self._finished[key] = self._make_rollout(key)
            on_finished(self._finished[key], self._step_of(key))

    def _request(self, key: int, sampling: SamplingConfig) -> Request:
        """What continues a response."""
        (prompt, occurrence), held = self._prompt_of(key), self._held[key]
        sample = occurrence * self._group_size + key % self._group_size
        seed = derive_seed(self._run_seed, self._step_of(key), prompt.prompt_id, sample, position=len(held.tokens))
        left = replace(sampling, max_tokens=sampling.max_tokens - len(held.tokens))
        tokens = np.concatenate([prompt.tokens, held.tokens])
        return Request(key, tokens, seed, left, num_sampled=len(held.tokens))

    def _make_rollout(self, key: int) -> Rollout:
        held = self._held[key]
        return Rollout.from_response(
            self._prompt_of(key)[0],
            key % self._group_size,
            held.tokens,
            held.logprobs,
            held.finish_reason,
            held.versions,
            held.kept,
        ).with_routes(held.routes)

    def _step_of(self, key: int) -> int:
        """The step that learns from a sample, where none is dropped; also part of its seed."""
        return key // self._group_size // self._batch_size + 1

    def _prompt_of(self, key: int) -> tuple[Prompt, int]:
        """The prompt of a sample, and how often the same one came before in its batch."""
        number, place = divmod(key // self._group_size, self._batch_size)
        return self._batch(number)[place]

    def _read_batch(self, number: int) -> list[tuple[Prompt, int]]:
        first = number * self._batch_size
        prompts = [self._prompts.stream.prompt(position) for position in range(first, first + self._batch_size)]
        return list(zip(prompts, count_occurrences(prompts), strict=True))

    def _name(self, key: int) -> str:
        return f"prompt_id {self._prompt_of(key)[0].prompt_id}, sample {key % self._group_size}"

    def _sum_over_engines(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Sums of what the first ranks of all engines give; collective."""
        total = torch.zeros(len(values), dtype=torch.float64)
        if self._generator.is_first:
            total += torch.as_tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return total.numpy()

    def _describe(self, busy_share: float | None) -> dict[str, float]:
        """Metrics after a phase, None: there was none; collective."""
        tokens = sum(len(held.tokens) for held in self._held.values())
        carried, tokens, busy = self._sum_over_engines([len(self._held), tokens, busy_share or 0.0]).tolist()
        metrics = {"schedule/carried": carried, "schedule/carried_tokens": tokens}
        if busy_share is not None:
            metrics["schedule/engine_busy"] = busy / len(self._generator.engines.of)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Steps, and which prompts have begun and were not taken; `rank_state` has what there is of them.

        They are the last ones that have begun, but for `taken`, which is empty with `order: stream`.
        """
        begun = self._prompts.position
        span = range(min(self._open, default=begun), begun)
        return {
            "step": self._step,
            "open": len(self._open),
            "taken": sorted({*span} - {*self._open}),
            "group_size": self._group_size,
            "order": self._schedule.order,
            "truncated": self._rollout.is_truncated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, after that of the prompts.

        Raises:
            UserError: a prompt has another number of responses now, or may be passed over, or truncated sampling is
                off now, and some have begun.
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
        begun, self._step = self._prompts.position, state.get("step", 0)
        self._open = sorted({*range(begun - state["open"] - len(taken), begun)} - {*taken})

    def rank_state(self) -> dict[str, torch.Tensor]:
        """The responses that this rank speaks for; {}: there are none."""
        if not self._held or not self._generator.is_first:
            return {}
        place = torch.tensor([self._generator.engine_index, len(self._generator.engines.of)])
        return pack_responses(self._held) | {"engine": place}

    def load_rank_states(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Take up the responses of all ranks: on the engine that they had, or evenly if there are more or fewer."""
        mine, num_engines = self._generator.engine_index, len(self._generator.engines.of)
        self._held, self._finished = {}, {}
        for state in states:
            engine, of = state["engine"].tolist()
            for key, response in unpack_responses(state).items():
                if (engine if of == num_engines else key % num_engines) == mine:
                    self._held[key] = response
