# SPDX-License-Identifier: Apache-2.0
"""From prompts to rollouts: every sample has an engine, and every engine serves its samples as one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.build import BuiltEngine
from megatron_rl.engines.checking import check_routes, check_sampled
from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.engines.sampling import SamplingConfig, derive_seed
from megatron_rl.observability.rollout_progress import RolloutProgress
from megatron_rl.parallel.collectives import raise_together, reduce_scalars
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.rollout.carried import CarriedResponses
from megatron_rl.rollout.dispatch import assign_engines
from megatron_rl.rollout.order import STRIDE, Samples, count_occurrences, name_sample
from megatron_rl.rollout.serving import Channel, ControlMessage, Listener, close_batch, serve
from megatron_rl.types import Prompt, Rollout, RouteShape, UserError
from megatron_rl.weights.families import ModelShape


class CacheUse:
    """Counts the requests of one engine in one generation."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        self._sums = {"asked": 0.0, "cached": 0.0}

    def ask(self, requests: Sequence[Request]) -> None:
        """Requests that the engine gets."""
        self._lengths |= {request.key: len(request.tokens) for request in requests}

    def hear(self, sampled: Sampled) -> None:
        """Count the result of one request; nothing if the engine does not report it."""
        length = self._lengths.pop(sampled.key, 0)
        if sampled.num_cached is not None:
            self._sums["asked"] += length
            self._sums["cached"] += sampled.num_cached

    def describe(self, counts: bool, group: dist.ProcessGroup) -> dict[str, float]:
        """The metric rollout/prefix_cache_hits, or none if no engine says; collective.

        Args:
            counts: this rank speaks for its engine.
            group: all ranks.
        """
        mine = self._sums if counts else dict.fromkeys(self._sums, 0.0)
        sums = reduce_scalars(mine, dist.ReduceOp.SUM, group, torch.device("cpu"))
        return {"rollout/prefix_cache_hits": sums["cached"] / sums["asked"]} if sums["asked"] else {}


@dataclass(frozen=True)
class SampleGroups:
    """Groups to generate, the same on every rank. A sample's key is index of the prompt * group_size + sample_index.

    Attributes:
        prompts, group_size: one group each; its samples.
        sampling, step, round: how to draw them; the last two are part of every sample's seed.
    """

    prompts: Sequence[Prompt]
    group_size: int
    sampling: SamplingConfig
    step: int
    round: int = 0

    def __len__(self) -> int:
        return len(self.prompts) * self.group_size

    def sample_of(self, key: int) -> tuple[Prompt, int]:
        """The prompt of a sample, and its place in the group."""
        return self.prompts[key // self.group_size], key % self.group_size

    def name(self, key: int) -> str:
        """What a message calls the sample of a request."""
        return name_sample(*self.sample_of(key % STRIDE))


class HeldWeights(Protocol):
    """What an engine's weights are: of which model, and after how many optimizer steps."""

    shape: ModelShape
    policy_version: int


class Generator(Protocol):
    """What generates groups of rollouts: responses (`RolloutGenerator`) or episodes (`EpisodeGenerator`)."""

    engines: EngineRanks
    is_first: bool  # this rank speaks for its engine
    metrics: dict[str, float]  # of the last generation, the same on every rank
    route_shape: RouteShape | None  # of the routes that rollouts come with

    def generate(
        self, groups: SampleGroups, on_finished: Callable[[Rollout], None] | None = None
    ) -> dict[int, Rollout]:
        """See `RolloutGenerator.generate`."""
        ...

    def carry(self, samples: Samples) -> Any:
        """Return the holder of the samples that begin ahead of their step."""
        ...

    def close(self) -> None:
        """Release the engine."""


class RolloutGenerator:
    """Generates groups of responses with the weights that the engines hold; the same calls on every rank.

    Args:
        engine: this rank's share.
        weights: that it holds.
        channel: to the other ranks of the engine.
        config: which samples go to which engine.
        run_seed: seed of the run, see `derive_seed`.
        group: all ranks.
        progress: counts the responses.

    Attributes:
        engines: the ranks of each.
        metrics: of the last generation, the same on every rank.
        engine_index: of this rank's; -1: it has none.
        is_first: this rank is its first, which speaks for it.
        route_shape: of the routes that rollouts come with; None: they come without.
    """

    def __init__(
        self,
        engine: BuiltEngine,
        weights: HeldWeights,
        channel: Channel,
        *,
        config: RolloutConfig,
        run_seed: int,
        group: dist.ProcessGroup,
        progress: RolloutProgress,
    ) -> None:
        self._engine, self._weights, self._channel, self._run_seed = engine, weights, channel, run_seed
        self._group, self._progress, self._dispatch = group, progress, config.dispatch
        self.engines, self.metrics, self.route_shape = engine.ranks, dict[str, float](), engine.route_shape
        self.engine_index, _ = engine.ranks.find(group.rank())
        self.is_first = self.engine_index >= 0 and channel.is_first

    @property
    def policy_version(self) -> int:
        """Optimizer steps behind the weights of the engines."""
        return self._weights.policy_version

    def count(self, num_tokens: int) -> None:
        """Tell the progress of a response that is there."""
        if self.is_first:
            self._progress.count(num_tokens)

    def generate(
        self, groups: SampleGroups, on_finished: Callable[[Rollout], None] | None = None
    ) -> dict[int, Rollout]:
        """Generate responses; collective.

        Args:
            groups: what to generate.
            on_finished: called on the first rank of an engine with a rollout as soon as its response is there, while
                others are being generated; not decoded yet. Given on every rank or on none.

        Returns:
            The rollouts of this rank's engine, on each of its ranks, by key.

        Raises:
            Exception: what `on_finished` raised, after the generation, on every rank.
            UserError: the engine returned something else than what it was asked for; on every rank.
        """
        requests = self.build_requests(groups)
        stream = _Stream(groups, self.policy_version, self.count, on_finished if self.is_first else None)
        self.serve(requests, close_batch(requests), stream, name=groups.name, total=len(groups))
        return stream.rollouts

    def build_requests(self, groups: SampleGroups) -> list[Request]:
        """The requests for the first turns of this rank's engine, in order of their keys."""
        prompts, group_size, sampling = groups.prompts, groups.group_size, groups.sampling
        engines = assign_engines(
            self._dispatch,
            [len(prompt.tokens) for prompt in prompts],
            group_size,
            len(self.engines.of),
            sampling.max_tokens,
        )
        # The position in the batch is part of the sample's identity: a prompt can come twice in a step,
        # at an epoch boundary, and must not get the same responses twice.
        occurrences = count_occurrences(prompts)
        requests = []
        for key in np.flatnonzero(engines == self.engine_index).tolist():
            prompt, sample = groups.sample_of(key)
            sample += occurrences[key // group_size] * group_size
            seed = derive_seed(self._run_seed, groups.step, prompt.prompt_id, sample, groups.round)
            requests.append(Request(key, prompt.tokens, seed, sampling))
        return requests

    def serve(
        self,
        requests: Sequence[Request],
        take: Callable[[bool], ControlMessage],
        on_sampled: Listener,
        *,
        name: Callable[[int], str],
        total: int | None,
        on_requests: Callable[[Sequence[Request]], None] | None = None,
    ) -> None:
        """Serve requests of this rank's engine, and check what it returns; collective.

        Args:
            requests: that are made; looked at in the end.
            take, on_sampled, on_requests: as in `rollout.serving.serve`.
            name: what a message calls the request of a key.
            total: responses of all engines, which the progress counts; None: it does not.

        Raises:
            Exception: what `take` or `on_sampled` raised, on every rank.
            UserError: the engine returned something else than what it was asked for; on every rank.
        """
        sampled: dict[int, Sampled] = {}
        cache = CacheUse()

        def listen(one: Sampled) -> None:
            sampled[one.key] = one
            cache.hear(one)
            on_sampled(one)

        def tell(asked: Sequence[Request]) -> None:
            cache.ask(asked)
            if on_requests is not None:
                on_requests(asked)

        is_watching = self.is_first or self.engine_index < 0  # rank 0 shows the progress wherever the engines are
        in_flight = self._engine.requests.tokens_in_flight if is_watching else None
        with nullcontext() if total is None else self._progress.follow(total, in_flight):
            error = None
            if self.engine_index >= 0:
                error = serve(self._engine.requests, take, listen, self._channel, on_requests=tell)
            if error is None and self.is_first:
                error = self._find_fault(sampled, requests, name)
            raise_together(error, self._group)
        self.metrics = cache.describe(self.is_first, self._group)

    def _find_fault(
        self, sampled: Mapping[int, Sampled], requests: Sequence[Request], name: Callable[[int], str]
    ) -> UserError | None:
        """What is wrong with the responses of this engine; an interrupted one may have no token."""
        unasked, asked, names = dict(sampled), [], []
        for request in requests:
            found = unasked.pop(request.key, None)
            is_empty = found is not None and found.finish_reason == "interrupted" and not len(found.tokens)
            names += [] if is_empty else [name(request.key)]
            asked += [found] if found is not None and not is_empty else []
        longest = max((request.sampling.max_tokens for request in requests), default=0)
        try:
            check_sampled(
                [*asked, *unasked.values()],
                names,
                max_tokens=longest,
                vocab_size=self._weights.shape.vocab_size,
                engine=f"rollout engine {self.engine_index} ({self._engine.kind}, "
                f"{self.engines.describe(self.engine_index)})",
                is_truncated=any(request.sampling.is_truncated for request in requests),
                has_whole=not any(request.sampling.keeps_likely for request in requests),
            )
            if self.route_shape is not None:
                check_routes([*asked, *unasked.values()], f"rollout engine {self.engine_index}", self.route_shape)
        except UserError as error:
            return error
        return None

    def carry(self, samples: Samples) -> CarriedResponses:
        """Return the holder of the responses that begin ahead of their step."""
        return CarriedResponses(samples)

    def close(self) -> None:
        """Release the engine."""
        self._engine.requests.close()


class _Stream:
    """Makes rollouts of responses as they come, counts them, and tells a listener."""

    def __init__(
        self,
        groups: SampleGroups,
        policy_version: int,
        count: Callable[[int], None],
        listener: Callable[[Rollout], None] | None,
    ) -> None:
        self._groups, self._policy_version = groups, policy_version
        self._count, self._listener = count, listener
        self.sampled: dict[int, Sampled] = {}
        self.rollouts: dict[int, Rollout] = {}

    def __call__(self, sampled: Sampled) -> None:
        self.sampled[sampled.key] = sampled
        if sampled.key < 0 or np.shape(sampled.tokens) != np.shape(sampled.logprobs):
            return  # what is wrong is said at the end
        rollout = Rollout.from_response(
            *self._groups.sample_of(sampled.key),
            sampled.tokens,
            sampled.logprobs,
            sampled.finish_reason,
            self._policy_version,
            sampled.kept,
        )
        rollout = self.rollouts[sampled.key] = rollout.with_routes(sampled.routes).with_inserted(sampled.inserted)
        self._count(len(sampled.tokens))
        if self._listener is not None:
            self._listener(rollout)
