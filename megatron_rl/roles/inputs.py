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

from megatron_rl.algorithms.catalog import find_policy_loss
from megatron_rl.algorithms.resolution import resolve
from megatron_rl.checkpoint.side_files import find_model_files
from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.run_spec import Roles
from megatron_rl.config.schema import LayoutConfig, RunConfig, TrainedConfig
from megatron_rl.config.sft_plan import SftPlan
from megatron_rl.data.prompts import PromptSet, SftSet, load_prompts, load_sft_examples, name_files
from megatron_rl.data.tokenizer import Tokenizer, find_stop_tokens, load_tokenizer
from megatron_rl.engines.protocol import find_engine
from megatron_rl.parallel.heads import check_context_parallel
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.rewards.plan import RewardPlan, build_reward_plan
from megatron_rl.rewards.truths import check_truths
from megatron_rl.roles.parts import NO_PARTS, Parts
from megatron_rl.types import UserError
from megatron_rl.weights.families import SCORE_HEAD, ModelShape, load_model_shape

HAS_TORCH = importlib.util.find_spec("torch") is not None


@dataclass(frozen=True)
class ModelInputs:
    """The model on disk, the layout it is to have, and the tokens that end its responses."""

    shape: ModelShape
    tokenizer: Tokenizer
    layout: ParallelLayout
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScoringInputs:
    """A model with a score head on disk (critic or reward model), and the layout it is to have."""

    path: str
    shape: ModelShape
    layout: ParallelLayout


@dataclass(frozen=True)
class RlInputs:
    """Everything an RL run reads before it starts; `critic` and `reward_model` are None where there is none.

    Attributes:
        plan: batch arithmetic for these prompts.
        notes: settings that have no effect in this run, and ground truths that a rule cannot read, one line each.
    """

    roles: Roles
    model: ModelInputs
    train: PromptSet
    validation: dict[str, PromptSet]
    reward_plan: RewardPlan
    critic: ScoringInputs | None
    reward_model: ScoringInputs | None
    plan: BatchPlan
    notes: list[str]


@dataclass(frozen=True)
class SftInputs:
    """Everything an SFT run reads before it starts; `plan` is the batch arithmetic for these examples."""

    model: ModelInputs
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
    roles = resolve(config)
    find_policy_loss(config.algorithm.policy_loss)
    find_engine(config.rollout.engine)
    BatchPlan.build(config, world_size, roles)  # before files are read, which takes longer
    reward_plan = _read_reward_plan(config, parts)
    model = read_model_inputs(config, world_size)
    model.shape.check_rollout_layout(config.rollout.tensor_model_parallel_size)
    if roles.reference and config.reference.path:
        reference = load_model_shape(find_model_files(config.reference.path))
        if reference != model.shape:
            raise UserError("the reference has another architecture than the policy", source="reference.path",
                            expected=str(model.shape), hint="use a checkpoint of the same model")
        check_weights(config.reference.path, reference)
    critic = reward_model = None
    if roles.critic:
        path = config.critic.path or config.model.path
        critic = _read_scoring_inputs(config, "critic", world_size, model, path, may_lack=(SCORE_HEAD,))
    if roles.reward_model:
        reward_model = _read_scoring_inputs(config, "reward_model", world_size, model, config.reward_model.path)
    validation = {
        name: load_prompts([file], model.tokenizer, config.data, limit=config.data.validation_limit)
        for name, file in name_files(config.data.validation_files).items()
    }
    train = load_prompts(config.data.train_files, model.tokenizer, config.data)
    plan = BatchPlan.build(config, world_size, roles, len(train.prompts))
    prompts = [prompt for part in (train, *validation.values()) for prompt in part.prompts]
    notes = _find_idle_settings(config, roles, plan) + check_truths(reward_plan, prompts)
    return RlInputs(
        roles=roles, model=model, train=train, validation=validation, reward_plan=reward_plan, critic=critic,
        reward_model=reward_model, plan=plan, notes=notes)


def read_sft_inputs(config: RunConfig, world_size: int) -> SftInputs:
    """Read and check the model and the examples.

    Raises:
        UserError: anything in them that is wrong.
    """
    SftPlan.build(config, world_size)
    model = read_model_inputs(config, world_size)
    data = load_sft_examples(config.data.train_files, model.tokenizer, config.data)
    return SftInputs(model, data, SftPlan.build(config, world_size, len(data.examples)), _note_what_is_not_read())


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
    stop_token_ids = find_stop_tokens(tokenizer, find_model_files(config.model.path), shape.vocab_size)
    return ModelInputs(shape, tokenizer, layout, stop_token_ids)


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
    if shape.num_experts and isinstance(config, TrainedConfig):
        _check_experts(config, shape, section)
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


def _read_scoring_inputs(
    config: RunConfig, section: str, world_size: int, model: ModelInputs, path: str,
    may_lack: tuple[str, ...] = (),
) -> ScoringInputs:
    shape = load_model_shape(find_model_files(path), head="score")
    check_weights(path, shape, may_lack=may_lack)
    _check_positions(config, shape)
    _check_vocabulary(model.tokenizer, shape, f"model.tokenizer and {path}")
    return ScoringInputs(path, shape, read_layout(getattr(config, section), world_size, shape, section))


def _find_idle_settings(config: RunConfig, roles: Roles, plan: BatchPlan) -> list[str]:
    """A note for each setting whose effect the roles or the length of the run rule out; see `config/idle.py`."""
    trainer, notes = config.trainer, []
    if trainer.critic_warmup and not roles.critic:
        notes.append(f"ignored: trainer.critic_warmup={trainer.critic_warmup}, there is no critic")
    if trainer.capture_step is not None and trainer.capture_step > plan.total_steps:
        notes.append(f"ignored: trainer.capture_step={trainer.capture_step}, the run takes "
                     f"{plan.total_steps} steps")
    return notes + _note_what_is_not_read()


def _note_what_is_not_read() -> list[str]:
    return [] if HAS_TORCH else ["not checked: the headers of the weights, because torch is not installed"]
