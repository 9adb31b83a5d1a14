# SPDX-License-Identifier: Apache-2.0
"""From a config to the roles of a run, in two halves.

`read_inputs` reads and checks everything that a user can get wrong, on every rank alike and before any
process group exists. `build_*` make the groups, the models and the engine from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.algorithms.advantages import RegisteredEstimator, find_advantage_estimator
from megatron_rl.algorithms.losses import find_policy_loss
from megatron_rl.algorithms.plugins import load_plugins
from megatron_rl.checkpoint.distributed import check_weights
from megatron_rl.checkpoint.huggingface import save_huggingface
from megatron_rl.checkpoint.side_files import find_model_files, list_side_files
from megatron_rl.config.schema import LayoutConfig, RunConfig, TrainableConfig
from megatron_rl.data.prompts import PromptSet, load_prompts, name_files
from megatron_rl.data.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.hybrid_engine import HybridEngine
from megatron_rl.observability.timers import PhaseTimers
from megatron_rl.parallel.collectives import Process
from megatron_rl.parallel.groups import ParallelGroups, build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.parallel.ulysses import check_context_parallel
from megatron_rl.parts import Parts
from megatron_rl.resharding.aliasing import find_aliases
from megatron_rl.resharding.planner import group_shards
from megatron_rl.rewards.plan import RewardPlan, build_reward_plan
from megatron_rl.rollout.engine import EngineSpec, build_engine, find_engine
from megatron_rl.training.actor import Actor
from megatron_rl.training.critic import Critic
from megatron_rl.training.reference import Reference
from megatron_rl.training.reward_model import RewardModel
from megatron_rl.training.step import check_step_mode
from megatron_rl.types import UserError
from megatron_rl.weights.families import SCORE_HEAD, ModelShape, load_model_shape
from megatron_rl.weights.placement import Placement


@dataclass(frozen=True)
class ModelInputs:
    """The model on disk and the layout it is to have."""

    shape: ModelShape
    tokenizer: Tokenizer
    layout: ParallelLayout


@dataclass(frozen=True)
class ScoringInputs:
    """A model with a score head on disk (critic or reward model), and the layout it is to have."""

    path: str
    shape: ModelShape
    layout: ParallelLayout


@dataclass(frozen=True)
class RlInputs:
    """Everything an RL run reads before it starts; `critic` and `reward_model` are None where there is none."""

    model: ModelInputs
    train: PromptSet
    validation: dict[str, PromptSet]
    reward_plan: RewardPlan
    estimator: RegisteredEstimator
    critic: ScoringInputs | None
    reward_model: ScoringInputs | None


def launched_sizes() -> tuple[int, int]:
    """Number of ranks that torchrun started, in all and on this node (1 without it)."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def group_timeout(config: RunConfig) -> timedelta:
    """Time limit of the process groups: somewhat more than the watchdog's, which explains what it ends."""
    return timedelta(seconds=config.trainer.collective_timeout + 30)


def read_layout(config: LayoutConfig, world_size: int, shape: ModelShape, section: str) -> ParallelLayout:
    """A role's layout, checked against its model.

    Raises:
        UserError: ranks or a model that do not divide.
    """
    layout = ParallelLayout(
        world_size, tp_size=config.tensor_model_parallel_size, pp_size=config.pipeline_model_parallel_size,
        vpp_size=config.virtual_pipeline_model_parallel_size or 1, cp_size=config.context_parallel_size,
        ep_size=config.expert_model_parallel_size)
    shape.check_training_layout(
        layout.tp_size, layout.pp_size, layout.vpp_size, layout.ep_size, sequence_parallel=config.sequence_parallel,
        section=section)
    check_context_parallel(shape.num_heads, shape.num_kv_heads, layout.tp_size, layout.cp_size, section=section)
    if isinstance(config, TrainableConfig):
        check_step_mode(config, shape, section)
    return layout


def read_model_inputs(config: RunConfig, world_size: int) -> ModelInputs:
    """Read and check the model directory, the tokenizer and the layout.

    Raises:
        UserError: missing or mismatching files, a layout that the model does not fit.
    """
    shape = load_model_shape(find_model_files(config.model.path))
    layout = read_layout(config.actor, world_size, shape, "actor")
    check_weights(config.model.path, shape)
    _check_positions(config, shape)
    tokenizer = load_tokenizer(Path(config.model.tokenizer or find_model_files(config.model.path)))
    _check_vocabulary(tokenizer, shape, "model.tokenizer and model.path")
    return ModelInputs(shape, tokenizer, layout)


def _check_positions(config: RunConfig, shape: ModelShape) -> None:
    longest = config.data.max_prompt_length + config.data.max_response_length
    if longest > shape.max_position_embeddings:
        raise UserError(
            f"max_prompt_length + max_response_length = {longest} tokens", source="data.max_*_length",
            expected=f"at most the model's max_position_embeddings, {shape.max_position_embeddings}",
            hint="shorten one of them or use a model with longer positions")


def _check_vocabulary(tokenizer: Tokenizer, shape: ModelShape, source: str) -> None:
    if tokenizer.vocab_size > shape.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {shape.vocab_size}", source=source,
            expected="a tokenizer that fits the model", hint="the two belong to different models")


def read_rl_inputs(config: RunConfig, world_size: int, parts: Parts) -> RlInputs:
    """Read and check the models, the prompts, the reward sources and the user's plugins.

    Args:
        config: after `parts.enter`.
        world_size: number of ranks.
        parts: given as objects.

    Raises:
        UserError: anything in them that is wrong.
    """
    load_plugins(config.algorithm.plugins)
    estimator = find_advantage_estimator(config.algorithm.adv_estimator)
    find_policy_loss(config.algorithm.policy_loss)
    find_engine(config.rollout.engine)
    model = read_model_inputs(config, world_size)
    model.shape.check_rollout_layout(config.rollout.tensor_model_parallel_size)
    if config.algorithm.kl_coef > 0 and config.reference.path:
        reference = load_model_shape(find_model_files(config.reference.path))
        if reference != model.shape:
            raise UserError("the reference has another architecture than the policy", source="reference.path",
                            expected=str(model.shape), hint="use a checkpoint of the same model")
        check_weights(config.reference.path, reference)
    validation = {
        name: load_prompts([file], model.tokenizer, config.data, limit=config.data.validation_limit)
        for name, file in name_files(config.data.validation_files).items()
    }
    return RlInputs(
        model=model, train=load_prompts(config.data.train_files, model.tokenizer, config.data),
        validation=validation, reward_plan=_read_reward_plan(config, parts), estimator=estimator,
        critic=_read_critic(config, world_size, model, estimator),
        reward_model=_read_reward_model(config, world_size, model))


def _read_reward_plan(config: RunConfig, parts: Parts) -> RewardPlan:
    """The reward sources; a reward model alone needs no list of components."""
    reward = config.reward
    if parts.reward_model is not None or (config.reward_model.path and not reward.components):
        if parts.reward is not None or (parts.reward_model and config.reward_model.path):
            raise UserError("a reward model beside another reward", source="the objects that were passed",
                            expected="one of them", hint="name the others with their weights in reward.components")
        reward = replace(reward, components=[*reward.components, "1.0 model"])
    return build_reward_plan(reward, config.data.max_response_length, parts.reward)


def _read_critic(
    config: RunConfig, world_size: int, model: ModelInputs, estimator: RegisteredEstimator
) -> ScoringInputs | None:
    critic = config.critic
    if not (estimator.needs_values if critic.enable is None else critic.enable):
        return None
    path = critic.path or config.model.path
    return _read_scoring_inputs(config, "critic", world_size, model, path, may_lack=(SCORE_HEAD,))


def _read_reward_model(config: RunConfig, world_size: int, model: ModelInputs) -> ScoringInputs | None:
    path = config.reward_model.path
    return _read_scoring_inputs(config, "reward_model", world_size, model, path) if path else None


def _read_scoring_inputs(
    config: RunConfig, section: str, world_size: int, model: ModelInputs, path: str,
    may_lack: tuple[str, ...] = (),
) -> ScoringInputs:
    shape = load_model_shape(find_model_files(path), head="score")
    check_weights(path, shape, may_lack=may_lack)
    _check_positions(config, shape)
    _check_vocabulary(model.tokenizer, shape, f"model.tokenizer and {path}")
    return ScoringInputs(path, shape, read_layout(getattr(config, section), world_size, shape, section))


def build_actor(
    config: RunConfig, inputs: ModelInputs, groups: ParallelGroups, total_optimizer_steps: int,
    make: Callable[..., Actor] = Actor,
) -> Actor:
    """The policy in training, its weights read from `model.path`; collective."""
    return make(
        config.model, config.actor, inputs.shape, groups, path=config.model.path,
        temperature=config.rollout.temperature, seed=config.trainer.seed,
        total_optimizer_steps=total_optimizer_steps)


def build_reference(
    config: RunConfig, inputs: ModelInputs, groups: ParallelGroups, make: Callable[..., Reference] = Reference
) -> Reference | None:
    """The frozen model of the KL term in the actor's layout, or None when no term needs it."""
    if config.algorithm.kl_coef == 0:
        return None
    return make(
        config.model, config.actor, inputs.shape, groups, path=config.reference.path or config.model.path,
        temperature=config.rollout.temperature, seed=config.trainer.seed, offload=config.reference.offload)


def build_critic(
    config: RunConfig, inputs: ScoringInputs | None, groups: ParallelGroups, total_optimizer_steps: int,
    make: Callable[..., Critic] = Critic,
) -> Critic | None:
    """The value model, or None when no estimator needs one; collective."""
    if inputs is None:
        return None
    return make(
        config.model, config.critic, inputs.shape, _groups_of(inputs.layout, groups, config), path=inputs.path,
        seed=config.trainer.seed, total_optimizer_steps=total_optimizer_steps)


def build_reward_model(
    config: RunConfig, inputs: ScoringInputs | None, groups: ParallelGroups
) -> RewardModel | None:
    """The reward model, or None without `reward_model.path`; collective."""
    if inputs is None:
        return None
    return RewardModel(
        config.model, config.reward_model, inputs.shape, _groups_of(inputs.layout, groups, config), path=inputs.path,
        seed=config.trainer.seed)


def _groups_of(layout: ParallelLayout, actor_groups: ParallelGroups, config: RunConfig) -> ParallelGroups:
    """The actor's process groups for a role of the same layout, else groups of its own."""
    if layout == actor_groups.layout:
        return actor_groups
    return build_groups(layout, group_timeout(config))


def build_hybrid_engine(
    config: RunConfig, inputs: ModelInputs, actor: Actor, process: Process, timers: PhaseTimers
) -> HybridEngine:
    """The rollout engine with the plan that brings the actor's weights into it; collective."""

    def lend(wanted: list[Placement]) -> dict[str, torch.Tensor]:
        if not config.hybrid.alias_weights:
            return {}
        pairs = find_aliases(actor.placements(process.rank), wanted)
        return {name: actor.params[owned] for name, owned in pairs.items()}

    engine = build_engine(EngineSpec(
        model_path=str(find_model_files(config.model.path)), shape=inputs.shape, dtype=config.model.dtype,
        max_prompt_length=config.data.max_prompt_length, max_response_length=config.data.max_response_length,
        config=config.rollout, process=process, seed=config.trainer.seed, lend=lend))
    return HybridEngine(
        actor, engine, engine_tp_size=config.rollout.tensor_model_parallel_size, process=process,
        group=dist.group.WORLD, config=config.hybrid,
        run_seed=config.trainer.seed, timers=timers)


def save_actor(directory: Path, config: RunConfig, actor: Actor) -> None:
    """Write the actor in HF format, with the tokenizer and config of `model.path`; collective."""
    save_huggingface(
        directory, actor.shape, group_shards(actor.placements, actor.shard_key, actor.groups.layout.world_size),
        actor.params, side_files_from=find_model_files(config.model.path), group=actor.groups.world,
        bucket_bytes=config.hybrid.bucket_bytes)


def side_files(config: RunConfig, path: str) -> dict[str, Path]:
    """What belongs to the model of a role beside its weights."""
    tokenizer = config.model.tokenizer
    return list_side_files(Path(path), Path(tokenizer) if tokenizer else None)
