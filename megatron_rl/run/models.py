# SPDX-License-Identifier: Apache-2.0
"""Decide which roles a run has, and read their models from disk: shape, layout, weights and tokenizer, all checked.

torch is imported for the headers of the weights, and may be missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_rl.algorithms.catalog import ADVANTAGE_ESTIMATORS, plan_old_logprobs
from megatron_rl.checkpoint.files import MTP_ROLE, find_model_files, find_mtp_weights
from megatron_rl.config.run_spec import RoleSpec, RunSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.extension.registry import ENGINES
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.role_layouts import DTYPE_BYTES, check_layout
from megatron_rl.types import UserError
from megatron_rl.weights.families import SCORE_HEAD, ModelShape
from megatron_rl.weights.model_config import check_mtp, find_adapters, is_image_text, load_model_shape


def resolve(config: RunConfig) -> RunSpec:
    """Import the user's plugins and return the models that an RL run builds.

    Raises:
        UserError: a plugin cannot be imported, the estimator is unknown, or
            `importance_sampling = bypass` and `old_logprobs` are computed before the update.
    """
    if config.algorithm.plugins:
        from megatron_rl.extension.user_code import load_plugins

        load_plugins(config.algorithm.plugins)
    estimator = ADVANTAGE_ESTIMATORS[config.algorithm.adv_estimator]
    roles = [_make_actor(config)]
    if config.algorithm.kl_coef > 0:
        roles.append(_make_reference(config))
    roles += [_make_frozen(f"teachers.{name}", teacher, "logprob") for name, teacher in config.teachers.items()]
    if estimator.needs_values:
        roles.append(
            RoleSpec(
                name="critic",
                path=config.critic.path or config.model.path,
                section="critic",
                settings=config.critic,
                head="value",
                trainable=True,
                may_lack=(SCORE_HEAD,),
            )
        )
    roles += [_make_frozen(name, config.section(name), "score") for name in config.reward_model.roles.values()]
    return RunSpec(
        roles={role.name: role for role in roles},
        needs_greedy_baseline=estimator.needs_greedy_baseline,
        needs_group=estimator.needs_group,
        needs_sum_pi_squared=estimator.needs_sum_pi_squared,
        needs_turns=estimator.needs_turns,
        why_recompute=plan_old_logprobs(config, estimator),
    )


def resolve_sft(config: RunConfig) -> RunSpec:
    """Return the only role of an SFT run, the trained actor."""
    return RunSpec(roles={"actor": _make_actor(config)})


def _make_reference(config: RunConfig) -> RoleSpec:
    """Return the role of the frozen reference; with LoRA on the same ranks, it shares the actor's base weights."""
    is_base = bool(config.actor.lora.rank) and config.reference.path in (None, config.model.path)
    return RoleSpec(
        name="reference",
        path=config.reference.path or config.model.path,
        section="actor",
        settings=config.actor,
        head="logprob",
        offload=config.reference.offload,
        is_reset=config.reference.reset_every is not None,
        batch_invariant=config.rollout.bitwise,
        shares="actor" if is_base and config.placement.reference == config.placement.actor else None,
    )


def _make_frozen(name: str, section: Any, head: Literal["logprob", "score"]) -> RoleSpec:
    return RoleSpec(name=name, path=section.path, section=name, settings=section, head=head, offload=section.offload)


def _make_actor(config: RunConfig) -> RoleSpec:
    return RoleSpec(
        name="actor",
        path=config.model.path,
        section="actor",
        settings=config.actor,
        head="logprob",
        trainable=True,
        batch_invariant=config.rollout.bitwise,
    )


NOT_HERE = "this machine could not start the run"  # begins a note
HAS_TORCH = importlib.util.find_spec("torch") is not None


@dataclass(frozen=True)
class RoleInputs:
    """The model of a role on disk and its layout on the ranks of the role."""

    spec: RoleSpec
    shape: ModelShape
    layout: ParallelLayout


def read_models(config: RunConfig, spec: RunSpec, world_size: int) -> tuple[dict[str, RoleInputs], Tokenizer]:
    """Read and check models and layouts of all roles, in order, and the policy's tokenizer (UserError if unfit)."""
    actor = _read_role(config, spec.roles["actor"], world_size)
    if actor.spec.batch_invariant and HAS_TORCH:
        from megatron_rl.weights.support import check_bitwise

        check_bitwise(actor.shape, actor.layout.tp_size, config.rollout.engine)
    tokenizer = load_tokenizer(
        Path(config.model.tokenizer or find_model_files(config.model.path)),
        reads_marks=config.data.special_tokens_in_contents,
    )
    _check_vocabulary(tokenizer, actor.shape, "model.tokenizer and model.path")
    found = {"actor": actor}
    for name, role in spec.roles.items():
        if name == "reference":
            if role.path != actor.spec.path:
                shape = load_model_shape(find_model_files(role.path), setting="reference.path")
                if shape != actor.shape:
                    other = {key: value for key, value in vars(shape).items() if value != getattr(actor.shape, key)}
                    raise UserError(
                        f"the reference has another architecture than the policy: {other}",
                        source="reference.path",
                        expected="a model of the policy's architecture",
                        hint="use a checkpoint of the same model",
                    )
                _check_weights(role, shape)
            ranks = config.placement.ranks_of(name, world_size)
            layout = read_layout(role, ranks, actor.shape, config.model.dtype)
            found[name] = replace(actor, spec=role, layout=layout)
        elif name != "actor":
            found[name] = _read_role(config, role, world_size)
            _check_vocabulary(tokenizer, found[name].shape, f"model.tokenizer and {role.path}")
        if role.is_teacher:
            _check_vocabularies(config, role, tokenizer, actor.shape, found[name].shape)
    return found, tokenizer


def read_rl_models(config: RunConfig, spec: RunSpec, world_size: int) -> tuple[dict[str, RoleInputs], Tokenizer]:
    """Read the models of an RL run, and check the policy against its engine.

    Raises:
        UserError: as `read_models`; or the engine, its layout, its adapters or routing replay does not fit the policy,
            vLLM lacks its family or an option, or the engine's library cannot read its config.json.
    """
    roles, tokenizer = read_models(config, spec, world_size)
    policy = roles["actor"].shape
    adapters = find_adapters(policy, config.actor.lora, "actor") if config.hybrid.lora == "adapter" else None
    if policy.num_experts or policy.delta_net is not None or adapters is not None:
        from megatron_rl.weights.rollout_layout import check_engine

        check_engine(policy, config.rollout.engine, config.rollout.quantization, adapters)
    check_model = ENGINES[config.rollout.engine].check_model
    if check_model is not None:
        check_model(policy, config.rollout)
    if HAS_TORCH and config.rollout.supports("reads_config"):
        _check_transformers(find_model_files(config.model.path), is_built=config.rollout.supports("builds_model"))
    if config.rollout.ranks_per_engine > 1:
        from megatron_rl.weights.support import check_rollout_layout

        check_rollout_layout(policy, config.rollout.tensor_model_parallel_size, config.rollout.expert_parallel_size)
    if (source := config.actor.router_replay) != "off":
        from megatron_rl.weights.support import check_router_replay

        check_router_replay(policy, source)
    if config.actor.mtp_lr or config.rollout.draft_tokens:
        actor, is_trained = roles["actor"], config.actor.mtp_lr > 0
        check_mtp(find_model_files(actor.spec.path), "actor.mtp_lr" if is_trained else "rollout.draft_tokens")
        path = str(find_mtp_weights(Path(actor.spec.path)))
        mtp = replace(actor.spec, name=MTP_ROLE, path=path, trainable=is_trained)
        _check_weights(mtp, policy.mtp)
        roles[MTP_ROLE] = RoleInputs(mtp, policy.mtp, actor.layout.last_stage)
    return roles, tokenizer


def note_models(config: RunConfig, roles: Mapping[str, RoleInputs], engine: str | None = None) -> list[str]:
    """Return notes: the image-text models (only their text part is used), and the notes of `check_machine`."""
    paths = dict.fromkeys(role.spec.path for role in roles.values())
    seeing = [path for path in paths if is_image_text(find_model_files(path))]
    notes = [f"{path} is an image-text model: its text part is used, and saved as a text model" for path in seeing]
    return notes + check_machine(config, roles, engine)


def _read_role(config: RunConfig, spec: RoleSpec, world_size: int) -> RoleInputs:
    setting = "model.path" if spec.name == "actor" else f"{spec.name}.path"
    shape = load_model_shape(find_model_files(spec.path), "lm" if spec.head == "logprob" else "score", setting)
    layout = read_layout(spec, config.placement.ranks_of(spec.name, world_size), shape, config.model.dtype)
    _check_weights(spec, shape)
    longest = config.data.max_prompt_length + config.data.max_response_length
    if longest > shape.max_position_embeddings:
        raise UserError(
            f"max_prompt_length + max_response_length = {longest} tokens",
            source="data.max_prompt_length and data.max_response_length",
            expected=f"at most the model's max_position_embeddings, {shape.max_position_embeddings}",
            hint="shorten one of them or use a model with longer positions",
        )
    return RoleInputs(spec, shape, layout)


def _check_transformers(model: Path, *, is_built: bool) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM  # slow imports, which the engines need

    file = model / "config.json"
    if json.loads(file.read_bytes())["model_type"] not in CONFIG_MAPPING:
        return
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        if is_built:
            with torch.device("meta"):
                AutoModelForCausalLM.from_config(config)
    except Exception as error:  # of many types: each class of config checks its values by itself
        raise UserError(
            f"transformers cannot read it: {' '.join(str(error).split())[:300]}",
            source=str(file),
            expected="values of the types that transformers has",
            hint="correct the value, or take the file from the model again",
        ) from error


def _check_weights(spec: RoleSpec, shape: ModelShape) -> None:
    """Check by headers that a role's weights, and adapters if given, fit its shape (UserError); needs torch."""
    adapters = find_adapters(shape, spec.lora, spec.section, is_quantized=spec.is_quantized)
    if HAS_TORCH:
        from megatron_rl.checkpoint import pieces

        pieces.check_weights(spec.path, shape, spec.may_lack)
        if adapters is not None and spec.lora is not None and spec.lora.path is not None:
            from megatron_rl.checkpoint import peft

            peft.check_adapters(spec.lora.path, adapters, f"{spec.section}.lora.path")


def _check_vocabulary(tokenizer: Tokenizer, shape: ModelShape, source: str) -> None:
    if tokenizer.vocab_size > shape.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {shape.vocab_size}",
            source=source,
            expected="a tokenizer that fits the model",
            hint=f"take the model's own, or save the model after resize_token_embeddings({tokenizer.vocab_size})",
        )


def _check_vocabularies(
    config: RunConfig, role: RoleSpec, tokenizer: Tokenizer, student: ModelShape, teacher: ModelShape
) -> None:
    """Refuse a teacher with other token ids (kind full: or fewer logits) than the policy."""
    theirs = load_tokenizer(find_model_files(Path(role.path))).read_vocabulary()
    differing = [token for token, index in tokenizer.read_vocabulary().items() if theirs.get(token) != index]
    if differing:
        raise UserError(
            f"{len(differing)} of the policy's tokens have other ids in the tokenizer of {role.title}, such as "
            f"{differing[0]!r}",
            source=f"{role.section}.path and model.path",
            expected="one vocabulary: a teacher scores the token ids that the policy has sampled",
            hint="choose a teacher of the policy's family",
        )
    if config.algorithm.distillation.kind == "full" and teacher.vocab_size < student.vocab_size:
        raise UserError(
            f"{role.title} has {teacher.vocab_size} logits, the policy {student.vocab_size}",
            source=f"{role.section}.path and algorithm.distillation.kind",
            expected="a logit of the teacher for each of the policy's",
            hint="set algorithm.distillation.kind=top_k",
        )


def read_layout(spec: RoleSpec, ranks: range, shape: ModelShape, dtype: str) -> ParallelLayout:
    """Return a role's layout on its ranks (UserError if the model or its optimizer step does not fit it)."""
    layout = check_layout(spec, shape, ranks)
    if (cp_size := layout.cp_size) > 1:
        from megatron_rl.weights.support import check_context_parallel

        for kv_heads in {shape.num_kv_heads, shape.full.num_kv_heads}:
            check_context_parallel(shape.num_heads, kv_heads, layout.tp_size, cp_size, section=spec.section)
    if not shape.num_experts or not spec.trainable or spec.training.step_mode != "graph":
        return layout
    section = spec.section
    from megatron_rl.weights.packed_experts import why_in_turn

    if reason := why_in_turn(spec, shape, layout, DTYPE_BYTES[dtype]):
        raise UserError(
            f"{section}.step_mode = graph with a mixture of {shape.num_experts} experts that are multiplied one after "
            f"the other ({reason}): the host reads how many rows each of them has, which a graph cannot hold",
            source=f"{section}.step_mode",
            expected="experts that are multiplied in one product, or another step mode",
            hint=f"set {section}.step_mode=static: the same step without capture",
        )
    return layout


def check_graphs(config: RunConfig, roles: Iterable[RoleInputs]) -> None:
    """Refuse the step mode `graph` where graphs cannot be captured (UserError)."""
    for role in roles:
        if role.spec.trainable and role.spec.training.step_mode == "graph":
            from megatron_rl.training.cuda_graph import check_step_mode

            check_step_mode(role.spec, role.shape, config.model.dtype)


def check_machine(config: RunConfig, roles: Mapping[str, RoleInputs], engine: str | None = None) -> list[str]:
    """Refuse a config that this machine cannot run; without torchrun, return the reason as a note.

    Args:
        engine: `None` if the policy samples nothing.

    Raises:
        UserError: a step mode, Transformer Engine, or a model in its engine needs a GPU.
    """
    if not HAS_TORCH:
        return []
    import torch

    try:
        check_graphs(config, roles.values())
        if config.model.transformer_impl == "transformer_engine":
            from megatron_rl.models.attention_kernels import check_transformer_engine

            check_transformer_engine()
        check_on_cpu = ENGINES[engine].check_on_cpu if engine is not None else None
        if check_on_cpu is not None and not torch.cuda.is_available():
            check_on_cpu(roles["actor"].shape, config.rollout)
    except UserError as error:
        if "RANK" in os.environ:
            raise
        return [f"{NOT_HERE}: {error.found}"]
    return []
