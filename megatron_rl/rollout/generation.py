# SPDX-License-Identifier: Apache-2.0
"""From prompts to rollouts: the one loop between the samples of an engine and its requests.

A batch that begins and ends in one call, such as a validation set, is a phase that drains (`generate`); a run whose
samples begin ahead of their step has phases of its own (`rollout.stream`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.config.sections import AgentsConfig
from megatron_rl.engines.build import BuiltEngine
from megatron_rl.engines.checking import check_sampled, miscounted
from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.observability.rollout_progress import RolloutProgress
from megatron_rl.parallel.collectives import raise_together, reduce_scalars
from megatron_rl.rollout.dispatch import assign_engines
from megatron_rl.rollout.episodes import Episodes, describe_episodes
from megatron_rl.rollout.order import SampleGroups, Samples
from megatron_rl.rollout.phase import Phase
from megatron_rl.rollout.serving import Channel, ControlMessage, serve
from megatron_rl.types import Prompt, Rollout
from megatron_rl.weights.families import ModelShape

if TYPE_CHECKING:
    from megatron_rl.agents.in_rank import AnyEpisodes


class OpenRequests:
    """Counts the requests of one engine in one generation.

    Attributes:
        running: by key.
        asked, heard: how many there were, and responses.
    """

    def __init__(self) -> None:
        self.running: dict[int, Request] = {}
        self.asked = self.heard = 0
        self._sums = {"asked": 0.0, "cached": 0.0}

    def ask(self, requests: Sequence[Request]) -> None:
        """Requests that the engine gets."""
        self.running |= {request.key: request for request in requests}
        self.asked += len(requests)

    def hear(self, sampled: Sampled) -> Request | None:
        """Return the request of a response, which runs no longer; None: it was not asked for."""
        self.heard += 1
        request = self.running.pop(sampled.key, None)
        if request is not None and sampled.num_cached is not None:
            self._sums["asked"] += len(request.tokens)
            self._sums["cached"] += sampled.num_cached
        return request

    def describe(self, counts: bool, group: dist.ProcessGroup) -> dict[str, float]:
        """The metric rollout/prefix_cache_hits, or none if no engine says; collective.

        Args:
            counts: this rank speaks for its engine.
            group: all ranks.
        """
        mine = self._sums if counts else dict.fromkeys(self._sums, 0.0)
        sums = reduce_scalars(mine, dist.ReduceOp.SUM, group, torch.device("cpu"))
        return {"rollout/prefix_cache_hits": sums["cached"] / sums["asked"]} if sums["asked"] else {}


class HeldWeights(Protocol):
    """What an engine's weights are: of which model, and after how many optimizer steps."""

    shape: ModelShape
    policy_version: int


# Told of a rollout that is finished, not decoded yet, and of the step that learns from it where none is dropped.
OnFinished = Callable[[Rollout, int], None]


class RolloutGenerator:
    """Generates rollouts with the weights that the engines hold; the same calls on every rank.

    Args:
        engine: this rank's share.
        weights: that it holds.
        channel: to the other ranks of the engine.
        config: which samples go to which engine.
        run_seed: seed of the run, see `derive_seed`.
        group: all ranks.
        progress: counts the responses.
        agents: how episodes are played; by default responses are not answered.
        processes: of this rank's environments.

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
        agents: AgentsConfig | None = None,
        processes: AnyEpisodes | None = None,
    ) -> None:
        self._engine, self._weights, self._channel, self._run_seed = engine, weights, channel, run_seed
        self._group, self._progress, self._dispatch = group, progress, config.dispatch
        self._agents, self._processes = agents or AgentsConfig(), processes
        self.engines, self.metrics, self.route_shape = engine.ranks, dict[str, float](), engine.route_shape
        self.engine_index, _ = engine.ranks.find(group.rank())
        self.is_first = self.engine_index >= 0 and channel.is_first
        self._name = f"rollout engine {self.engine_index} ({engine.kind}, {engine.ranks.describe(self.engine_index)})"

    def generate(self, groups: SampleGroups, on_finished: OnFinished | None = None) -> dict[int, Rollout]:
        """Generate groups from their beginning to their end; collective.

        With an environment, `groups.sampling.max_tokens` bounds the tokens behind the prompt, observations included.

        Args:
            groups: what to generate.
            on_finished: called on the first rank of an engine as soon as a rollout is there, while others are being
                generated. Given on every rank or on none.

        Returns:
            The rollouts of this rank's engine, on each of its ranks, by key; only the first one knows how episodes
            with an environment ended.

        Raises:
            Exception: as `run`.
        """
        episodes = self.open(groups)
        mine = self.assign(groups.prompts, groups.group_size, groups.sampling.max_tokens)
        episodes.begin(mine)
        episodes.start(mine, groups.sampling)
        phase = Phase(range(len(groups.prompts)), np.zeros(len(groups.prompts)), end=None)
        try:
            self.run(episodes, phase, on_finished, total=len(groups))
        finally:
            episodes.close()
        if self._agents.has_episodes:
            counts = reduce_scalars(episodes.counts, dist.ReduceOp.SUM, self._group, torch.device("cpu"))
            self.metrics |= describe_episodes(counts)
        return {key: episodes.rollout(key) for key in mine}

    def open(self, samples: Samples) -> Episodes:
        """Return the holder of the samples of this rank's engine."""
        return Episodes(samples, self._run_seed, self._agents, self._processes if self.is_first else None)

    def assign(
        self, prompts: Sequence[Prompt], group_size: int, max_tokens: int, loads: np.ndarray | None = None
    ) -> list[int]:
        """Return which samples of these prompts are of this rank's engine; arguments as of `assign_engines`."""
        lengths = [len(prompt.tokens) for prompt in prompts]
        engines = assign_engines(self._dispatch, lengths, group_size, len(self.engines.of), max_tokens, loads)
        return np.flatnonzero(engines == self.engine_index).tolist()

    def run(self, episodes: Episodes, phase: Phase, on_finished: OnFinished | None, total: int | None) -> None:
        """Serve what `episodes` ask for from the beginning of a phase to its end; collective.

        Args:
            episodes: of this rank's engine, which have been started.
            phase: when it ends.
            on_finished: as in `generate`.
            total: rollouts of all engines, which the progress counts; None: it does not.

        Raises:
            Exception: of the processes or of `on_finished`, after the phase, on every rank.
            UserError: the engine returned something else than what it was asked for; on every rank.
        """
        samples, requests, error = episodes.samples, OpenRequests(), None

        def end(key: int) -> None:
            if phase.finish(key // samples.group_size) and self.is_first:
                self._progress.count(sum(turn.stop - turn.start for turn in episodes.rollout(key).turns))
            if on_finished is not None and self.is_first:
                on_finished(episodes.rollout(key), samples.step_of(key))

        def take(is_idle: bool) -> ControlMessage:
            if is_idle and requests.running:  # nobody would end the wait for them
                raise miscounted(requests.heard, requests.asked, self._name)
            following = episodes.follow()
            for key in following.finished:
                end(key)
            return phase.take(is_idle, following, requests.running)

        def tell(added: Sequence[Request]) -> None:
            requests.ask(added)
            episodes.ask(added)

        def listen(sampled: Sampled) -> None:
            request = requests.hear(sampled)
            if request is not None:  # else the counts say so
                self._check(sampled, request, samples)
                if episodes.hear(sampled, self._weights.policy_version):
                    end(sampled.key)

        is_watching = self.is_first or self.engine_index < 0  # rank 0 shows the progress wherever the engines are
        in_flight = self._engine.requests.tokens_in_flight if is_watching else None
        with nullcontext() if total is None else self._progress.follow(total, in_flight):
            if self.engine_index >= 0:
                engine, guard = self._engine.requests, phase.guard
                error = serve(engine, guard(take), guard(listen), self._channel, on_requests=tell)
            if error is None and requests.heard != requests.asked:
                error = miscounted(requests.heard, requests.asked, self._name)
            raise_together(error, self._group)
        episodes.stop()
        self.metrics = requests.describe(self.is_first, self._group)

    def _check(self, sampled: Sampled, request: Request, samples: Samples) -> None:
        if sampled.finish_reason == "interrupted" and not len(sampled.tokens):
            return
        prompt, sample = samples.sample_of(request.key)
        check_sampled(
            sampled,
            request,
            vocab_size=self._weights.shape.vocab_size,
            source=f"{self._name}, prompt_id {prompt.prompt_id}, sample {sample}",
            route_shape=self.route_shape,
        )

    def close(self) -> None:
        """End the processes of environments, and release the engine."""
        if self._processes is not None:
            self._processes.close_all()
        self._engine.requests.close()
