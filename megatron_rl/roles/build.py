# SPDX-License-Identifier: Apache-2.0
"""From what `inputs.py` has read and checked to the process groups, the models and the engine of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.huggingface import ShardedModel, save_huggingface
from megatron_rl.checkpoint.side_files import find_model_files, list_side_files
from megatron_rl.config.schema import RunConfig
from megatron_rl.engines.build import build_engine
from megatron_rl.engines.protocol import EngineSpec
from megatron_rl.observability.rollout_progress import RolloutProgress
from megatron_rl.observability.timers import PhaseTimers
from megatron_rl.parallel.collectives import Process, world
from megatron_rl.parallel.groups import ParallelGroups, build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.resharding.aliasing import find_aliases
from megatron_rl.resharding.planner import group_shards
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.critic import Critic
from megatron_rl.roles.inputs import RlInputs
from megatron_rl.roles.models import RoleInputs
from megatron_rl.roles.parts import Parts
from megatron_rl.roles.reference import Reference
from megatron_rl.roles.reward_model import RewardModel
from megatron_rl.rollout.control import open_channel
from megatron_rl.rollout.generation import RolloutGenerator
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.setup import RoleSetup
from megatron_rl.weight_sync.hybrid_engine import HybridEngine
from megatron_rl.weights.shard_box import ShardBox

_ROLES: dict[str, Callable[[RoleSetup], Any]] = {
    "actor": Actor, "reference": Reference, "critic": Critic, "reward_model": RewardModel}


def launched_sizes() -> tuple[int, int]:
    """Number of ranks that torchrun started, in all and on this node (1 without it)."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def group_timeout(config: RunConfig) -> timedelta:
    """Time limit of the process groups: somewhat more than the watchdog's, which explains what it ends."""
    return timedelta(seconds=config.trainer.collective_timeout + 30)


def build_roles(config: RunConfig, inputs: RlInputs, parts: Parts) -> dict[str, Any]:
    """The roles of an RL run by name; those of equal layout share their process groups. Collective."""
    groups: dict[ParallelLayout, ParallelGroups] = {}
    roles = {}
    for name, role in inputs.roles.items():
        if role.layout not in groups:
            groups[role.layout] = build_groups(role.layout, group_timeout(config))
        roles[name] = build_role(
            config, role, groups[role.layout], inputs.plan.total_optimizer_steps or 0,
            make=parts.roles.get(name))
    return roles


def build_role(
    config: RunConfig, inputs: RoleInputs, groups: ParallelGroups, total_optimizer_steps: int = 0,
    make: Callable[[RoleSetup], Any] | None = None,
) -> Any:
    """One role with the weights of its path; collective.

    Args:
        config: of the run.
        inputs: what the role is.
        groups: of its layout.
        total_optimizer_steps: length of its learning-rate schedule.
        make: the user's own class; None: ours.
    """
    return (make or _ROLES[inputs.spec.name])(RoleSetup(
        spec=inputs.spec, model=config.model, shape=inputs.shape, groups=groups, seed=config.trainer.seed,
        temperature=config.rollout.temperature, total_optimizer_steps=total_optimizer_steps))


def build_rollout(
    config: RunConfig, actor: Actor, process: Process, timers: PhaseTimers, progress: RolloutProgress
) -> tuple[HybridEngine, RolloutGenerator]:
    """The rollout engine: what brings the actor's weights into it, and what generates with it; collective."""

    def find_shareable(wanted: Sequence[ShardBox]) -> dict[str, torch.Tensor]:
        if not config.hybrid.alias_weights:
            return {}
        pairs = find_aliases(actor.model.placements(process.rank), wanted)
        return {name: actor.model.params[owned] for name, owned in pairs.items()}

    engine = build_engine(EngineSpec(
        model_path=str(find_model_files(config.model.path)), shape=actor.model.shape, dtype=config.model.dtype,
        max_prompt_length=config.data.max_prompt_length, max_response_length=config.data.max_response_length,
        config=config.rollout, process=process, seed=config.trainer.seed, shareable=find_shareable))
    tp_size, group = config.rollout.tensor_model_parallel_size, world()
    hybrid = HybridEngine(
        actor, engine.weights, engine_tp_size=tp_size, process=process, group=group, config=config.hybrid,
        timers=timers)
    return hybrid, RolloutGenerator(
        engine, hybrid, open_channel(group, tp_size, group_timeout(config)), config=config.rollout,
        run_seed=config.trainer.seed, group=group, progress=progress)


def actor_export(config: RunConfig, model: PackedModel) -> Callable[[Path], None]:
    """What writes the actor in HF format to a directory, with the tokenizer and config of `model.path`; collective."""
    model_files = find_model_files(config.model.path).absolute()  # a user's function may change the working directory

    def export(directory: Path) -> None:
        shards = group_shards(model.placements, model.shard_key, model.groups.layout.world_size)
        save_huggingface(
            directory, ShardedModel(model.shape, shards, model.params, model.groups.world),
            side_files_from=model_files, bucket_bytes=config.hybrid.bucket_bytes)

    return export


def side_files(config: RunConfig, path: str) -> dict[str, Path]:
    """What belongs to the model of a role beside its weights."""
    tokenizer = config.model.tokenizer
    return list_side_files(Path(path), Path(tokenizer) if tokenizer else None)
