# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic, models and data of preference learning, read before a run starts; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from megatron_rl.algorithms.catalog import PREFERENCE_LOSSES
from megatron_rl.config.checked import CheckedConfig
from megatron_rl.config.run_spec import RunSpec
from megatron_rl.config.schema import AlgorithmConfig, RunConfig
from megatron_rl.config.sft_plan import SftPlan
from megatron_rl.data.preference_rows import PreferenceSet, load_preferences
from megatron_rl.data.prompts import name_files
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.run.inputs import SftInputs, check_mixture, check_paths
from megatron_rl.run.models import RoleInputs, note_models, read_models, resolve, resolve_sft
from megatron_rl.types import UserError
from megatron_rl.weights.families import SCORE_HEAD

REWARD_MODELS = ("bradley_terry", "process")
_WITHOUT_REFERENCE = ("simpo", "orpo", *REWARD_MODELS)


@dataclass(frozen=True)
class PreferenceInputs(SftInputs):
    """Everything a preference run reads before it starts."""

    data: PreferenceSet
    reference: RoleInputs | None
    validation: Mapping[str, PreferenceSet]
    tokenizer: Tokenizer


def plan_preferences(config: RunConfig, world_size: int, num_examples: int | None = None) -> SftPlan:
    """Derive the batch arithmetic; a pair has two responses (UserError for sizes that do not fit)."""
    if config.algorithm.plugins:
        from megatron_rl.extension.user_code import load_plugins

        load_plugins(config.algorithm.plugins)
    PREFERENCE_LOSSES.check(config.preference.loss)
    if config.algorithm.kl_coef not in (0.0, config.preference.beta):
        raise UserError(
            f"algorithm.kl_coef = {config.algorithm.kl_coef} with preferences",
            source="algorithm.kl_coef",
            expected="0: the weight of the reference is preference.beta",
            hint=f"set preference.beta={config.algorithm.kl_coef} instead (TRL's beta)",
        )
    checked = CheckedConfig(config)
    checked.allow("actor.step_mode", "eager", "with preferences, whose loss has no fixed shape", "leave it out")
    weights = config.preference.kto_weights
    checked.require(
        len(weights) == 2 and min(weights) >= 0,
        "preference.kto_weights",
        "are no weights of desirable and undesirable responses",
        expected="two numbers of at least 0",
        hint="the default is [1.0, 1.0]",
    )
    checked.mistakes.raise_all()
    if config.preference.loss == "kto" and config.data.train_batch_size < 2:
        raise UserError(
            "data.train_batch_size = 1 with preference.loss = 'kto', whose baseline is of responses to other prompts",
            source="data.train_batch_size",
            expected="2 or more",
            hint="set data.train_batch_size=32",
        )
    if config.preference.loss == "process" and config.reward_model.step_separator is None:
        raise UserError(
            "preference.loss = 'process' without the text that separates steps",
            source="reward_model.step_separator",
            expected="a text of one token, which is written between the steps",
            hint='set reward_model.step_separator="\\n", here and where the model rewards responses',
        )
    _check_unread(config)
    return SftPlan.build(config, world_size, num_examples, 2 if config.preference.is_paired else 1)


def _check_unread(config: RunConfig) -> None:
    preference = config.preference
    if preference.nll_coef and preference.loss in REWARD_MODELS:
        raise UserError(
            f"preference.nll_coef = {preference.nll_coef} with preference.loss = {preference.loss!r}",
            source="preference.nll_coef",
            expected="null: this loss is a reward model's, which has no log-probs of tokens",
            hint="leave preference.nll_coef out",
        )
    if preference.reference_logprobs is None or preference.loss not in ("kto", *_WITHOUT_REFERENCE):
        return
    why = "whose baseline is of other responses in each batch" if preference.loss == "kto" else "without reference"
    raise UserError(
        f"preference.reference_logprobs with preference.loss = {preference.loss!r}, {why}",
        source="preference.reference_logprobs",
        expected="a loss of pairs that has a reference (dpo, robust, ipo or a plugin's)",
        hint="leave preference.reference_logprobs out",
    )


def resolve_preferences(config: RunConfig) -> RunSpec:
    """Return the trained model, which is a policy or (`REWARD_MODELS`) a reward model, and the reference, if needed."""
    if config.preference.loss in REWARD_MODELS:
        (actor,) = resolve_sft(config).roles.values()
        return RunSpec(roles={"actor": replace(actor, head="score", may_lack=(SCORE_HEAD,))})
    roles = resolve(replace(config, algorithm=with_reference(config))).roles
    return RunSpec(roles={name: role for name, role in roles.items() if name in ("actor", "reference")})


def with_reference(config: RunConfig) -> AlgorithmConfig:
    """Return the algorithm's section, whose kl_coef decides whether there is a reference."""
    beta = 0.0 if config.preference.loss in _WITHOUT_REFERENCE else config.preference.beta
    return replace(config.algorithm, kl_coef=beta)


def read_preference_inputs(config: RunConfig, world_size: int) -> PreferenceInputs:
    """Read and check the models and the preferences (UserError if any is wrong)."""
    plan_preferences(config, world_size)
    check_paths(config)
    roles, tokenizer = read_models(config, resolve_preferences(config), world_size)
    preference, data = config.preference, config.data
    separator = config.reward_model.step_separator if preference.loss == "process" else None
    load = partial(load_preferences, is_paired=preference.is_paired, step_separator=separator)
    train = load(data.train_files, tokenizer, data)
    validation = {
        name: load([file], tokenizer, data, limit=data.validation_limit)
        for name, file in name_files(data.validation_files).items()
    }
    check_mixture(data, train)
    plan = plan_preferences(config, world_size, len(train.examples))
    notes = note_models(config, roles)
    return PreferenceInputs(roles["actor"], train, plan, notes, roles.get("reference"), validation, tokenizer)
