# SPDX-License-Identifier: Apache-2.0
"""Groups of episodes in place of responses, and the episodes of runs that begin them ahead of their step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.agents.episode import Setup
from megatron_rl.agents.in_rank import AnyEpisodes, choose_episodes
from megatron_rl.checkpoint.side_files import find_model_files
from megatron_rl.config.schema import RunConfig
from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.engines.sampling import SamplingConfig
from megatron_rl.parallel.collectives import reduce_scalars, world
from megatron_rl.rollout.episodes import Episodes, describe_episodes
from megatron_rl.rollout.generation import RolloutGenerator, SampleGroups
from megatron_rl.rollout.order import Samples
from megatron_rl.rollout.serving import ControlMessage
from megatron_rl.types import Prompt, Rollout


@dataclass(frozen=True)
class _Batch:
    """The samples of one generation on this rank's engine, see `Samples`; none of them is interrupted."""

    groups: SampleGroups
    first: Mapping[int, Request]

    def sample_of(self, key: int) -> tuple[Prompt, int]:
        return self.groups.sample_of(key)

    def request(self, key: int, sampling: SamplingConfig, position: int = 0) -> Request:
        return self.first[key]


class EpisodeGenerator:
    """Generates groups of episodes in place of responses; the same calls on every rank.

    Args:
        generator: the engines.
        processes: of this rank's environments.
        config: of the run.
        group: all ranks.

    Attributes:
        engines: the ranks of each.
        is_first: this rank is the first of its engine.
        metrics: of the last generation, the same on every rank.
        route_shape: of the routes that rollouts come with; None: they come without.
    """

    def __init__(
        self,
        generator: RolloutGenerator,
        processes: AnyEpisodes,
        config: RunConfig,
        group: dist.ProcessGroup,
    ) -> None:
        self._generator, self._processes, self._group = generator, processes, group
        self._in_flight = config.agents.episodes_in_flight
        self.engines, self.is_first = generator.engines, generator.is_first
        self.route_shape = generator.route_shape
        self.metrics: dict[str, float] = {}

    def generate(
        self, groups: SampleGroups, on_finished: Callable[[Rollout], None] | None = None
    ) -> dict[int, Rollout]:
        """As `RolloutGenerator.generate`; only the first rank of an engine knows how its episodes ended.

        `groups.sampling.max_tokens` bounds the tokens behind the prompt, observations included.
        """
        generator = self._generator
        samples = _Batch(groups, {request.key: request for request in generator.build_requests(groups)})
        episodes = self._open(samples, shift=-len(groups))  # no key of `carry` is used again
        rollouts: dict[int, Rollout] = {}
        requests: list[Request] = []

        def hear(sampled: Sampled) -> None:
            episodes.hear(sampled, generator.policy_version)

        def take(is_idle: bool) -> ControlMessage:
            following = episodes.follow()
            for key in following.finished:
                rollouts[key] = episodes.rollout(key)
                generator.count(len(rollouts[key].response_tokens))
                if on_finished is not None:
                    on_finished(rollouts[key])
            requests.extend(following.requests)
            return ControlMessage(requests=following.requests, stop=following.is_last)

        episodes.begin(samples.first)
        episodes.start(samples.first, groups.sampling)
        try:
            generator.serve(requests, take, hear, name=groups.name, total=len(groups), on_requests=episodes.ask)
        finally:
            episodes.close()
        episodes.stop()
        counts = reduce_scalars(episodes.counts, dist.ReduceOp.SUM, self._group, torch.device("cpu"))
        self.metrics = describe_episodes(counts) | generator.metrics
        return rollouts if generator.is_first else {key: episodes.rollout(key) for key in episodes.keys}

    def carry(self, samples: Samples) -> Episodes:
        """What holds episodes that begin ahead of their step."""
        return self._open(samples, shift=0)

    def _open(self, samples: Samples, shift: int) -> Episodes:
        return Episodes(samples, self._processes if self.is_first else None, self._in_flight, shift)

    def close(self) -> None:
        """End the processes, and release the engine."""
        self._processes.close_all()
        self._generator.close()


def open_episodes(generator: RolloutGenerator, config: RunConfig, stop_token_ids: tuple[int, ...]) -> EpisodeGenerator:
    """Open the processes of the environments, and the generator of episodes over the engines."""
    agents = config.agents
    setup = Setup(
        environment=agents.environment,
        tokenizer=str(config.model.tokenizer or find_model_files(config.model.path)),
        options=config.data.apply_chat_template_kwargs,
        stop_token_ids=stop_token_ids,
        follows_template=agents.history == "template",
        max_turns=agents.max_turns,
        run_seed=config.trainer.seed,
        program=agents.program,
        tools=tuple(agents.tools),
        temperature=config.rollout.temperature,
        context_length=config.data.max_prompt_length + config.data.max_response_length,
        tool_format=agents.tool_format,
        reads_marks=config.data.special_tokens_in_contents,
    )
    processes = choose_episodes(setup, agents, is_debugged=config.trainer.debug_rank == world().rank())
    return EpisodeGenerator(generator, processes, config, world())
