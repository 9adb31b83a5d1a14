# SPDX-License-Identifier: Apache-2.0
"""Build the producers of a run's samples: engines with the actor's weights, prompts and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.checkpoint.side_files import find_model_files
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompt_order import PromptBatches, PromptStream
from megatron_rl.observability.rollout_progress import RolloutProgress
from megatron_rl.observability.timers import PhaseTimers
from megatron_rl.parallel.collectives import Process, world
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rollout.collector import Collector, RewardSources
from megatron_rl.rollout.stream import RolloutStream, open_stream
from megatron_rl.run.engine import build_rollout
from megatron_rl.run.inputs import RlInputs
from megatron_rl.run.parts import NO_PARTS, Parts
from megatron_rl.run.roles import group_timeout
from megatron_rl.samples.pack import Packer
from megatron_rl.training.roles.on_samples import RewardModelOnSamples, score_all_rollouts

if TYPE_CHECKING:
    from megatron_rl.agents.processes import AnyEpisodes


@dataclass(frozen=True)
class RunSinks:
    """Timers, progress display and schedule trace of a run; discarded by default."""

    timers: PhaseTimers = field(default_factory=PhaseTimers)
    progress: RolloutProgress = field(default_factory=RolloutProgress)
    trace: Path | None = None


@dataclass(frozen=True)
class RolloutMembers:
    """Producers of samples."""

    hybrid: Any
    collector: Any
    prompts: PromptBatches
    stream: RolloutStream | None
    reward_model: RewardModelOnSamples | None


def build_rollout_members(
    config: RunConfig,
    inputs: RlInputs,
    roles: Mapping[str, Any],
    process: Process,
    run: RunSinks,
    parts: Parts = NO_PARTS,
) -> RolloutMembers:
    """Build the engine around the actor, and the rewards; collective."""
    decode, model = inputs.tokenizer.decode, None
    if "reward_model" in roles:
        model = RewardModelOnSamples(
            roles["reward_model"],
            Packer(roles["reward_model"].model, config.reward_model, inputs.plan, config.algorithm, process.device),
        )
    data, train = config.data, inputs.train
    order = PromptStream(
        train.prompts, data.shuffle, config.trainer.seed, weights=data.weights, file_sizes=train.file_sizes
    )
    prompts = PromptBatches(order, data.train_batch_size)
    if parts.rollouts:
        return RolloutMembers(parts.rollouts, parts.rollouts, prompts, None, model)
    read = inputs.stop.read if inputs.stop else decode
    score = partial(score_all_rollouts, parts.reward_model, read) if parts.reward_model else model
    rewards = RewardSources(
        inputs.reward_plan, Scorer(inputs.reward_plan, config.reward, read), score, inputs.spec.needs_greedy_baseline
    )
    further = inputs.stop, inputs.thoughts, _open_episodes(config, inputs, process)
    hybrid, generator = build_rollout(config, roles["actor"], process, run.timers, run.progress, *further)
    for role in (roles[name] for name in ("critic", "mtp") if name in roles):
        hybrid.also_release(role.optimizer)
    stream = open_stream(
        generator, prompts, config, is_apart=hybrid.is_apart, timeout=group_timeout(config), trace=run.trace
    )
    collector = Collector(
        generator=generator,
        rewards=rewards,
        config=config,
        stop_token_ids=inputs.stop_token_ids,
        timers=run.timers,
        group=world(),
        stream=stream,
    )
    return RolloutMembers(hybrid, collector, prompts, stream, model)


def _open_episodes(config: RunConfig, inputs: RlInputs, process: Process) -> AnyEpisodes | None:
    if not config.agents.has_episodes:
        return None
    from megatron_rl.agents.processes import choose_episodes

    tokenizer = str(config.model.tokenizer or find_model_files(config.model.path))
    return choose_episodes(config, tokenizer, inputs.stop_token_ids, config.trainer.debug_rank == process.rank)
