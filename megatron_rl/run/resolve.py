# SPDX-License-Identifier: Apache-2.0
"""Decide which roles a run has."""

from __future__ import annotations

from megatron_rl.algorithms.catalog import find_advantage_estimator
from megatron_rl.algorithms.old_logprobs import plan_old_logprobs
from megatron_rl.config.run_spec import RoleSpec, RunSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.extension.user_code import load_plugins
from megatron_rl.types import UserError
from megatron_rl.weights.families import SCORE_HEAD


def resolve(config: RunConfig) -> RunSpec:
    """Import the user's plugins and return the models that an RL run builds.

    Raises:
        UserError: a plugin cannot be imported, the estimator is unknown or needs a disabled critic, or
            `importance_sampling = bypass` and `old_logprobs` are computed before the update.
    """
    load_plugins(config.algorithm.plugins)
    name = config.algorithm.adv_estimator
    estimator, enable = find_advantage_estimator(name), config.critic.enable
    if estimator.needs_values and enable is False:
        raise UserError(
            f"critic.enable = False contradicts algorithm.adv_estimator = {name!r}, which needs the values of a critic",
            source="critic.enable",
            expected="true, or null",
            hint="remove critic.enable, or set algorithm.adv_estimator=grpo for a run without a critic",
        )
    roles = [_make_actor(config)]
    if config.algorithm.kl_coef > 0:
        roles.append(_make_reference(config))
    for teacher, section in config.teachers.items():
        name = f"teachers.{teacher}"
        roles.append(
            RoleSpec(
                name=name, path=section.path, section=name, settings=section, head="logprob", offload=section.offload
            )
        )
    if estimator.needs_values if enable is None else enable:
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
    if config.reward_model.path is not None:
        roles.append(
            RoleSpec(
                name="reward_model",
                path=config.reward_model.path,
                section="reward_model",
                settings=config.reward_model,
                head="score",
                offload=config.reward_model.offload,
            )
        )
    return RunSpec(
        roles={role.name: role for role in roles},
        needs_greedy_baseline=estimator.needs_greedy_baseline,
        needs_group=estimator.needs_group,
        needs_sum_pi_squared=estimator.needs_sum_pi_squared,
        why_recompute=plan_old_logprobs(config, estimator),
    )


def resolve_sft(config: RunConfig) -> RunSpec:
    """Return the spec of an SFT run.

    Raises:
        UserError: `actor.mtp_lr` is set; that layer learns from the policy's own responses.
    """
    if config.actor.mtp_lr:
        raise UserError(
            f"actor.mtp_lr = {config.actor.mtp_lr} in supervised fine-tuning",
            source="actor.mtp_lr",
            expected="0: the layer learns from responses that the policy samples",
            hint="leave actor.mtp_lr out",
        )
    return RunSpec(roles={"actor": _make_actor(config)})


def _make_reference(config: RunConfig) -> RoleSpec:
    """Return the frozen policy; with LoRA on the same ranks, the actor without adapters."""
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
