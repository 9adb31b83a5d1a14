# SPDX-License-Identifier: Apache-2.0
"""What a run reads before it starts: models, tokenizer, prompts, rewards and plugins, each checked.

The start and the dry run call the same function here, on every rank alike and before any process group exists: what a
dry run lets pass is what starts. Torch is imported for the headers of the weights and by plugins that need it, and by
nothing else.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.algorithms.catalog import find_loss_aggregation, find_policy_loss
from megatron_rl.checkpoint.side_files import find_model_files
from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.run_spec import RoleSpec, RunSpec
from megatron_rl.config.schema import RunConfig, TrainedConfig
from megatron_rl.config.sft_plan import SftPlan
from megatron_rl.data.prompts import PromptSet, SftSet, load_prompts, load_sft_examples, name_files
from megatron_rl.data.tokenizer import Tokenizer, find_stop_tokens, load_tokenizer
from megatron_rl.engines.protocol import find_engine
from megatron_rl.parallel.heads import check_context_parallel
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import build_layout
from megatron_rl.rewards.plan import RewardPlan, build_reward_plan
from megatron_rl.rewards.truths import check_truths
from megatron_rl.roles.parts import NO_PARTS, Parts
from megatron_rl.roles.resolve import resolve, resolve_sft
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape, load_model_shape

HAS_TORCH = importlib.util.find_spec("torch") is not None


@dataclass(frozen=True)
class RoleInputs:
    """A model on disk, and the layout that it is to have.

    Attributes:
        spec: of the role.
        shape: of the model.
        layout: on all ranks.
    """

    spec: RoleSpec
    shape: ModelShape
    layout: ParallelLayout


@dataclass(frozen=True)
class RlInputs:
    """Everything an RL run reads before it starts.

    Attributes:
        spec: which roles it has.
        roles: their models by name, in the order of `spec`.
        tokenizer: of the policy.
        stop_token_ids: that end its responses.
        plan: batch arithmetic for these prompts.
        notes: settings that have no effect in this run, and ground truths that a rule cannot read, one line each.
    """

    spec: RunSpec
    roles: dict[str, RoleInputs]
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    train: PromptSet
    validation: dict[str, PromptSet]
    reward_plan: RewardPlan
    plan: BatchPlan
    notes: list[str]


@dataclass(frozen=True)
class SftInputs:
    """Everything an SFT run reads before it starts; `plan` is the batch arithmetic for these examples."""

    actor: RoleInputs
    data: SftSet
    plan: SftPlan
    notes: list[str]


def plan_rl(config: RunConfig, world_size: int) -> BatchPlan:
    """The batch arithmetic of an RL run before its prompts are read.

    Raises:
        UserError: a plugin or an estimator that is not there, or sizes that do not divide.
    """
    return BatchPlan.build(config, world_size, resolve(config))


def read_rl_inputs(config: RunConfig, world_size: int, parts: Parts = NO_PARTS) -> RlInputs:
    """Read and check the models, the prompts, the reward sources and the user's plugins.

    Args:
        config: after `parts.enter`.
        world_size: number of ranks.
        parts: given as objects.

    Raises:
        UserError: anything in them that is wrong.
    """
    spec = resolve(config)
    find_policy_loss(config.algorithm.policy_loss)
    find_loss_aggregation(config.algorithm.loss_agg_mode)
    find_engine(config.rollout.engine)
    BatchPlan.build(config, world_size, spec)  # before files are read, which takes longer
    reward_plan = _read_reward_plan(config, parts)
    actor = _read_role(config, spec.roles["actor"], world_size)
    tokenizer = _read_tokenizer(config, actor.shape)
    stop_token_ids = find_stop_tokens(tokenizer, find_model_files(config.model.path), actor.shape.vocab_size)
    actor.shape.check_rollout_layout(config.rollout.tensor_model_parallel_size)
    roles = {"actor": actor}
    for name, role in spec.roles.items():
        if name == "reference":
            roles[name] = _read_reference(role, actor)
        elif name != "actor":
            roles[name] = _read_role(config, role, world_size)
            _check_vocabulary(tokenizer, roles[name].shape, f"model.tokenizer and {role.path}")
    validation = {
        name: load_prompts([file], tokenizer, config.data, limit=config.data.validation_limit)
        for name, file in name_files(config.data.validation_files).items()
    }
    train = load_prompts(config.data.train_files, tokenizer, config.data)
    plan = BatchPlan.build(config, world_size, spec, len(train.prompts))
    prompts = [prompt for part in (train, *validation.values()) for prompt in part.prompts]
    notes = _find_idle_settings(config, spec, plan) + check_truths(reward_plan, prompts)
    return RlInputs(
        spec=spec, roles=roles, tokenizer=tokenizer, stop_token_ids=stop_token_ids, train=train, validation=validation,
        reward_plan=reward_plan, plan=plan, notes=notes)


def read_sft_inputs(config: RunConfig, world_size: int) -> SftInputs:
    """Read and check the model and the examples.

    Raises:
        UserError: anything in them that is wrong.
    """
    SftPlan.build(config, world_size)
    find_loss_aggregation(config.algorithm.loss_agg_mode)
    actor = _read_role(config, resolve_sft(config).roles["actor"], world_size)
    data = load_sft_examples(config.data.train_files, _read_tokenizer(config, actor.shape), config.data)
    return SftInputs(actor, data, SftPlan.build(config, world_size, len(data.examples)), _note_what_is_not_read())


def _read_role(config: RunConfig, spec: RoleSpec, world_size: int) -> RoleInputs:
    """Read and check the model of a role, and its layout.

    Raises:
        UserError: missing or mismatching files, a layout that the model does not fit.
    """
    shape = load_model_shape(find_model_files(spec.path), head="lm" if spec.head == "logprob" else "score")
    layout = _read_layout(spec, world_size, shape)
    check_weights(spec.path, shape, may_lack=spec.may_lack)
    _check_positions(config, shape)
    return RoleInputs(spec, shape, layout)


def _read_reference(spec: RoleSpec, actor: RoleInputs) -> RoleInputs:
    """A model like the actor's, in its layout; its files are read where they are others."""
    if spec.path != actor.spec.path:
        shape = load_model_shape(find_model_files(spec.path))
        if shape != actor.shape:
            raise UserError("the reference has another architecture than the policy", source="reference.path",
                            expected=str(actor.shape), hint="use a checkpoint of the same model")
        check_weights(spec.path, shape)
    return replace(actor, spec=spec)


def _read_tokenizer(config: RunConfig, shape: ModelShape) -> Tokenizer:
    tokenizer = load_tokenizer(Path(config.model.tokenizer or find_model_files(config.model.path)))
    _check_vocabulary(tokenizer, shape, "model.tokenizer and model.path")
    return tokenizer


def _read_layout(spec: RoleSpec, world_size: int, shape: ModelShape) -> ParallelLayout:
    """A role's layout, checked against its model.

    Raises:
        UserError: ranks or a model that do not divide.
    """
    layout, section = build_layout(spec.layout, world_size), spec.section
    shape.check_training_layout(
        layout.tp_size, layout.pp_size, layout.vpp_size, layout.ep_size,
        sequence_parallel=spec.layout.sequence_parallel, section=section)
    check_context_parallel(shape.num_heads, shape.num_kv_heads, layout.tp_size, layout.cp_size, section=section)
    if shape.num_experts and isinstance(spec.layout, TrainedConfig):
        _check_experts(spec.layout, shape, section)
    return layout


def _check_experts(config: TrainedConfig, shape: ModelShape, section: str) -> None:
    """Refuse what an optimizer step cannot do with a mixture of experts."""
    if config.overlap_grad_reduce:
        raise UserError(
            f"{section}.overlap_grad_reduce with a mixture of {shape.num_experts} experts: an expert without tokens "
            "has no gradient to wait for", source=f"{section}.overlap_grad_reduce", expected="false",
            hint=f"remove {section}.overlap_grad_reduce")
    if config.step_mode == "graph":
        raise UserError(
            f"{section}.step_mode = graph with a mixture of {shape.num_experts} experts: the number of tokens of each "
            "expert is read on the host to exchange them, which a graph cannot hold", source=f"{section}.step_mode",
            expected="eager or static for mixtures of experts", hint=f"set {section}.step_mode=eager")


def check_weights(path: str, shape: ModelShape, may_lack: tuple[str, ...] = ()) -> None:
    """Compare the headers of the weights with the shape; a dry run on a machine without torch leaves it out.

    Raises:
        UserError: weights that are missing, damaged, or another model's.
    """
    if HAS_TORCH:
        from megatron_rl.checkpoint import distributed

        distributed.check_weights(path, shape, may_lack)


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


def _read_reward_plan(config: RunConfig, parts: Parts) -> RewardPlan:
    """The reward sources; a reward model alone needs no list of components."""
    reward = config.reward
    if parts.reward_model is not None or (config.reward_model.path and not reward.components):
        if parts.reward is not None or (parts.reward_model and config.reward_model.path):
            raise UserError("a reward model beside another reward", source="the objects that were passed",
                            expected="one of them", hint="name the others with their weights in reward.components")
        reward = replace(reward, components=[*reward.components, "1.0 model"])
    return build_reward_plan(reward, config.data.max_response_length, parts.reward)


def _find_idle_settings(config: RunConfig, spec: RunSpec, plan: BatchPlan) -> list[str]:
    """A note for each setting whose effect the roles or the length of the run rule out; see `config/idle.py`."""
    trainer, notes = config.trainer, []
    if trainer.critic_warmup and "critic" not in spec.roles:
        notes.append(f"ignored: trainer.critic_warmup={trainer.critic_warmup}, there is no critic")
    if trainer.capture_step is not None and trainer.capture_step > plan.total_steps:
        notes.append(f"ignored: trainer.capture_step={trainer.capture_step}, the run takes "
                     f"{plan.total_steps} steps")
    return notes + _note_what_is_not_read()


def _note_what_is_not_read() -> list[str]:
    return [] if HAS_TORCH else ["not checked: the headers of the weights, because torch is not installed"]
