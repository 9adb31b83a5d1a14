# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic, models and data of preference learning, read before a run starts; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_rl.algorithms.catalog import PREFERENCE_LOSSES
from megatron_rl.config.run_spec import RunSpec
from megatron_rl.config.schema import AlgorithmConfig, RunConfig
from megatron_rl.config.sft_plan import SftPlan
from megatron_rl.data.preference_rows import PreferenceSet, load_preferences
from megatron_rl.data.prompts import name_files
from megatron_rl.extension.registry import find_entry
from megatron_rl.run.inputs import SftInputs, check_mixture, check_paths
from megatron_rl.run.models import RoleInputs, note_models, read_models, resolve, resolve_sft
from megatron_rl.types import UserError
from megatron_rl.weights.families import SCORE_HEAD


@dataclass(frozen=True)
class PreferenceInputs(SftInputs):
    """Everything a preference run reads before it starts."""

    data: PreferenceSet
    reference: RoleInputs | None
    validation: Mapping[str, PreferenceSet]


def plan_preferences(config: RunConfig, world_size: int, num_examples: int | None = None) -> SftPlan:
    """Derive the batch arithmetic; a pair has two responses (UserError for sizes that do not fit)."""
    if config.algorithm.plugins:
        from megatron_rl.extension.user_code import load_plugins

        load_plugins(config.algorithm.plugins)
    find_entry(PREFERENCE_LOSSES, config.preference.loss, "preference.loss")
    if config.algorithm.kl_coef not in (0.0, config.preference.beta):
        raise UserError(
            f"algorithm.kl_coef = {config.algorithm.kl_coef} with preferences",
            source="algorithm.kl_coef",
            expected="0: the weight of the reference is preference.beta",
            hint=f"set preference.beta={config.algorithm.kl_coef} instead (TRL's beta)",
        )
    if config.actor.step_mode != "eager":
        raise UserError(
            f"actor.step_mode = {config.actor.step_mode!r} with preferences, whose loss has no fixed shape",
            source="actor.step_mode",
            expected="eager",
            hint="leave actor.step_mode out",
        )
    if not config.preference.is_paired and config.data.train_batch_size < 2:
        raise UserError(
            "data.train_batch_size = 1 with preference.loss = 'kto', whose baseline is of responses to other prompts",
            source="data.train_batch_size",
            expected="2 or more",
            hint="set data.train_batch_size=32",
        )
    return SftPlan.build(config, world_size, num_examples, 2 if config.preference.is_paired else 1)


def resolve_preferences(config: RunConfig) -> RunSpec:
    """Return the trained model, which is a policy or (bradley_terry) a reward model, and the reference, if needed."""
    if config.preference.loss == "bradley_terry":
        (actor,) = resolve_sft(config).roles.values()
        return RunSpec(roles={"actor": replace(actor, head="score", may_lack=(SCORE_HEAD,))})
    roles = resolve(replace(config, algorithm=with_reference(config))).roles
    return RunSpec(roles={name: role for name, role in roles.items() if name in ("actor", "reference")})


def with_reference(config: RunConfig) -> AlgorithmConfig:
    """Return the algorithm's section, whose kl_coef decides whether there is a reference."""
    beta = config.preference.beta if config.preference.needs_reference else 0.0
    return replace(config.algorithm, kl_coef=beta)


def read_preference_inputs(config: RunConfig, world_size: int) -> PreferenceInputs:
    """Read and check the models and the preferences (UserError if any is wrong)."""
    plan_preferences(config, world_size)
    check_paths(config)
    roles, tokenizer = read_models(config, resolve_preferences(config), world_size)
    is_paired, data = config.preference.is_paired, config.data
    train = load_preferences(data.train_files, tokenizer, data, is_paired=is_paired)
    validation = {
        name: load_preferences([file], tokenizer, data, is_paired=is_paired, limit=data.validation_limit)
        for name, file in name_files(data.validation_files).items()
    }
    check_mixture(data, train)
    plan = plan_preferences(config, world_size, len(train.examples))
    return PreferenceInputs(roles["actor"], train, plan, note_models(config, roles), roles.get("reference"), validation)
