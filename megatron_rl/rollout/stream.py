# SPDX-License-Identifier: Apache-2.0
"""Samples of bounded staleness: begun ahead of their step, carried from phase to phase, and never dropped.

Prompt i of the data order may begin once i < (t + 1 + k) B, where t steps were taken and k is `schedule.max_staleness`;
the step after them learns from the prompts t B .. (t + 1) B - 1. Therefore no response begins with weights that are
more than k steps older than those that learn from it, every prompt is learned from once, and in the order of k = 0.
Dynamic sampling drops prompts, and takes the next ones in their place (`find_window`).

A phase ends when the batch of the step is whole. What is unfinished then keeps its tokens, their log-probs and the
version that made each of them, on the ranks of its engine, and continues there in the next phase from a prefill. Seeds
follow from the position in the data order and from the number of tokens that are there already: neither the engine
nor the time of an interruption decides what a segment draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.schema import RunConfig
from megatron_rl.data.stream import PromptBatches
from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.engines.sampling import SamplingConfig, derive_seed
from megatron_rl.rollout.carried import NOTHING, Response, pack_responses, unpack_responses
from megatron_rl.rollout.control import ControlMessage
from megatron_rl.rollout.dispatch import assign_engines
from megatron_rl.rollout.generation import RolloutGenerator, count_occurrences
from megatron_rl.rollout.phase import PhaseEnd, TrainingEnd
from megatron_rl.rollout.serving import Listener
from megatron_rl.types import Prompt, Rollout, UserError

_IDLE_SECONDS = 0.002


def find_window(taken: int, begun: int, wanted: int, ahead: int) -> tuple[range, range]:
    """Positions of the data order that a step takes, and those that begin in its phase.

    With `ahead` = k B no prompt is learned from more than k steps after the one in which it begins: when it begins,
    fewer than wanted + k B prompts that are not taken come before it. This step takes the first `wanted` of these, and
    each later one the first B at least.

    Args:
        taken: prompts that were taken: learned from, or dropped.
        begun: prompts that have begun, those included.
        wanted: prompts that the step still needs: B at first, later those in place of dropped ones.
        ahead: prompts that may begin before their step, `max_staleness` * B.
    """
    return range(taken, taken + wanted), range(begun, max(begun, taken + wanted + ahead))


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
    ) -> None:
        self._generator, self._prompts, self._end, self._group = generator, prompts, end, group
        self._training, self.runs_ahead = training, training is not None
        self._schedule, self._rollout, self._run_seed = config.schedule, config.rollout, config.trainer.seed
        self._batch_size, self._group_size = config.data.train_batch_size, config.rollout.n
        self._open = 0  # prompts that have begun, and were not taken
        self._held: dict[int, Response] = {}  # of this engine, by position * group_size + sample
        self._finished: dict[int, Rollout] = {}  # of these, what was told to a listener
        self._batch = lru_cache(maxsize=config.schedule.max_staleness + 2)(self._read_batch)

    @property
    def is_in_use(self) -> bool:
        """Whether samples are begun ahead of their step, or were and are still here."""
        return self._schedule.max_staleness > 0 or self._open > 0

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
        begun = self._prompts.position
        ahead = self._schedule.max_staleness * self._batch_size
        batch, new = find_window(begun - self._open, begun, count or self._batch_size, ahead)
        self._begin(new, sampling.max_tokens)
        keys = range(batch.start * self._group_size, batch.stop * self._group_size)
        phase = _Phase(
            self._requests(sampling),
            {key for key in keys if key in self._held and not self._held[key].is_finished},
            self._end,
            drains=self._schedule.updates == "drain" and not self.runs_ahead,
        )
        listen = partial(self._listen, phase, on_finished)
        held, missing = self._sum_over_engines([sum(key in self._held for key in keys), len(phase.missing)])
        assert held == len(keys), f"{held} of {len(keys)} samples have begun"
        generates = missing > 0 or round == 0
        if generates:
            self._end.begin()
            self._generator.serve(phase.requests, phase.take, phase.guard(listen), name=self._name, total=int(missing))
        rollouts = [
            (key, self._finished.pop(key, None) or self._make_rollout(key)) for key in keys if key in self._held
        ]
        for key, _ in rollouts:
            del self._held[key]
        self._prompts.advance(len(new))
        self._open = new.stop - batch.stop
        return Taken(
            [self._prompts.stream.prompt(position) for position in batch],
            [self._step_of(position * self._group_size) for position in batch],
            [(key // self._group_size - batch.start, rollout) for key, rollout in rollouts],
            self._describe(phase.busy_share() if generates else None),
        )

    def run_ahead(self, sampling: SamplingConfig, on_finished: Callable[[Rollout, int], None] | None) -> None:
        """Continue what has begun until training has ended, on ranks of the engines' own; collective.

        Arguments and errors as of `take`. Rank 0, which trains, says that it has ended.
        """
        assert self._training is not None
        self._training.begin()
        if self._group.rank() == 0:
            self._training.tell()
        phase = _Phase(self._requests(sampling), set(), self._training, drains=self._schedule.updates == "drain")
        listen = partial(self._listen, phase, on_finished)
        self._generator.serve(phase.requests, phase.take, phase.guard(listen), name=self._name, total=None)

    def _requests(self, sampling: SamplingConfig) -> list[Request]:
        """What continues the unfinished responses of this engine, in the order of the data."""
        return [self._request(key, sampling) for key, held in sorted(self._held.items()) if not held.is_finished]

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

    def _listen(self, phase: _Phase, on_finished: Callable[[Rollout, int], None] | None, sampled: Sampled) -> None:
        """Keep what an engine sampled."""
        key, held = sampled.key, self._held.get(sampled.key)
        phase.running.discard(key)
        if held is None or np.shape(sampled.tokens) != np.shape(sampled.logprobs):
            return  # what is wrong is said at the end
        self._held[key] = held = held.extend(sampled, self._generator.policy_version)
        if not held.is_finished:
            return
        if key in phase.missing:
            phase.missing.discard(key)
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
        return Request(key, np.concatenate([prompt.tokens, held.tokens]), seed, left)

    def _make_rollout(self, key: int) -> Rollout:
        held = self._held[key]
        return Rollout.from_response(
            self._prompt_of(key)[0],
            key % self._group_size,
            held.tokens,
            held.logprobs,
            held.finish_reason,
            held.versions,
        )

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

    def state_dict(self) -> dict[str, int]:
        """How many prompts have begun and were not taken; `rank_state` has what there is of them."""
        return {"open": self._open, "group_size": self._group_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved state.

        Raises:
            UserError: a prompt has another number of responses now, and some have begun.
        """
        if state["open"] and state["group_size"] != self._group_size:
            raise UserError(
                f"rollout.n = {self._group_size}, and {state['open']} prompts have begun with {state['group_size']} "
                "responses each",
                source="rollout.n",
                expected=str(state["group_size"]),
                hint="keep it, or start a new run from the checkpoint's weights",
            )
        self._open = state["open"]

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


class _Phase:
    """What the first rank of an engine orders from the beginning of a phase to its end.

    Attributes:
        requests: of the phase.
        running: keys of the unfinished ones.
        missing: keys of those which the step waits for.
    """

    def __init__(self, requests: Sequence[Request], missing: set[int], end: PhaseEnd, *, drains: bool) -> None:
        self.requests, self.missing, self._end, self._drains = requests, missing, end, drains
        self.running = {request.key for request in requests}
        self._has_begun = False
        self._started, self._idle_seconds = time.monotonic(), 0.0

    def take(self, is_idle: bool) -> ControlMessage:
        """The next message; see `rollout.serving.serve`."""
        if not self._has_begun:
            self._has_begun = True
            return ControlMessage(requests=self.requests, stop=self._drains)
        if self._end.is_over(not self.missing):
            return ControlMessage(interrupts=sorted(self.running), stop=True)
        if is_idle:
            time.sleep(_IDLE_SECONDS)
            self._idle_seconds += _IDLE_SECONDS
        return ControlMessage()

    def guard(self, listen: Listener) -> Listener:
        """A listener whose error ends the phase for all engines."""

        def guarded(sampled: Sampled) -> None:
            try:
                listen(sampled)
            except Exception:
                if not self._drains:
                    self._end.give_up()
                raise

        return guarded

    def busy_share(self) -> float:
        """Of the time since the beginning, the share in which the engine had requests."""
        return 1 - self._idle_seconds / max(time.monotonic() - self._started, _IDLE_SECONDS)
