# SPDX-License-Identifier: Apache-2.0
"""verl settings that only have a meaning together, and what each combination means here.

A group takes the settings of its names that were given and returns ours, plus notes. The rules
follow what verl does with the combination: `kl_loss_coef` without `use_kl_loss` has no effect
there, `filter_overlong_prompts` runs before `truncation`, `do_sample=False` overrules the
validation temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_rl.config.sources import ASSUMED, Setting
from megatron_rl.types import UserError

Parts = dict[str, Setting]
Combined = tuple[list[Setting], list[str]]

_USE_KL_LOSS = "actor_rollout_ref.actor.use_kl_loss"
_KL_LOSS_COEF = "actor_rollout_ref.actor.kl_loss_coef"
_USE_KL_IN_REWARD = "algorithm.use_kl_in_reward"
_KL_CTRL_COEF = "algorithm.kl_ctrl.kl_coef"
_REWARD_PATH, _REWARD_NAME = "custom_reward_function.path", "custom_reward_function.name"
_TRUNCATION, _FILTER = "data.truncation", "data.filter_overlong_prompts"
_DO_SAMPLE = "actor_rollout_ref.rollout.val_kwargs.do_sample"
_VAL_TEMPERATURE = "actor_rollout_ref.rollout.val_kwargs.temperature"
_CLIP_RATIO = "actor_rollout_ref.actor.clip_ratio"
_VERL_KL_LOSS_COEF = 0.001
_VERL_REWARD_NAME = "compute_score"


@dataclass(frozen=True)
class AliasGroup:
    """Names that are read together; `combine` gets those that were given.

    Attributes:
        names: verl names.
        meaning: what they become, for `--help`.
        combine: the rule.
    """

    names: tuple[str, ...]
    meaning: str
    combine: Callable[[Parts], Combined]


def _combine_kl(parts: Parts) -> Combined:
    """KL in the loss is the only KL there is; verl's two switches decide which coefficient counts."""
    use_loss, coef, ctrl = parts.get(_USE_KL_LOSS), parts.get(_KL_LOSS_COEF), parts.get(_KL_CTRL_COEF)
    in_reward = parts.get(_USE_KL_IN_REWARD)
    notes = []
    if in_reward is not None:
        if _boolean(in_reward):
            raise UserError(
                f"{_USE_KL_IN_REWARD} = true is not supported", source=in_reward.source,
                expected="false: the KL term is in the loss", hint="set algorithm.kl_coef instead",
            )
        notes.append(_note(in_reward, "the KL term is in the loss"))
    if ctrl is not None and not (use_loss or coef or in_reward):
        notes.append(f"read as algorithm.kl_coef: {_describe(ctrl)}, the KL term is in the loss")
        return [replace(ctrl, name="algorithm.kl_coef")], notes
    if ctrl is not None:
        notes.append(_note(ctrl, "it is the coefficient of a KL term in the reward"))
    settings, more = _combine_kl_loss(use_loss, coef)
    return settings, notes + more


def _combine_kl_loss(use_loss: Setting | None, coef: Setting | None) -> Combined:
    if use_loss is None:
        return ([] if coef is None else [replace(coef, name="algorithm.kl_coef")]), []
    if not _boolean(use_loss):
        note = [] if coef is None else [_note(coef, f"{_USE_KL_LOSS} is false")]
        return [replace(use_loss, name="algorithm.kl_coef", value=0.0)], note
    if coef is not None:
        return [replace(coef, name="algorithm.kl_coef")], []
    note = f"assumed: {_KL_LOSS_COEF}={_VERL_KL_LOSS_COEF} unless algorithm.kl_coef is given, because of {_USE_KL_LOSS}"
    return [replace(use_loss, name="algorithm.kl_coef", value=_VERL_KL_LOSS_COEF, layer=ASSUMED)], [note]


def _combine_reward(parts: Parts) -> Combined:
    path, name = parts.get(_REWARD_PATH), parts.get(_REWARD_NAME)
    if path is None or path.value is None:
        return [], [_note(setting, "no custom_reward_function.path is given") for setting in parts.values()]
    function = _VERL_REWARD_NAME if name is None else name.value
    for setting, value in ((path, path.value), (name, function)):
        if not isinstance(value, str):
            assert setting is not None  # the default name is text
            raise UserError(
                f"{setting.name} = {value!r} is not accepted", source=setting.source, expected="text",
                hint="give the file in custom_reward_function.path and the function in custom_reward_function.name",
            )
    latest = path if name is None else max(path, name, key=lambda setting: setting.layer)
    return [replace(latest, name="reward.function", value=f"{path.value}:{function}", text=None)], []


def _combine_overlong(parts: Parts) -> Combined:
    """Filtering runs before truncation, so with it no prompt is ever truncated or refused."""
    truncation, filtering = parts.get(_TRUNCATION), parts.get(_FILTER)
    if filtering is not None and _boolean(filtering):
        notes = [] if truncation is None else [_note(truncation, f"{_FILTER} drops long prompts first")]
        return [replace(filtering, name="data.overlong_prompts", value="drop", text=None)], notes
    notes = [] if filtering is None else [_note(filtering, "data.overlong_prompts decides")]
    if truncation is None:
        return [], notes
    policies = {"error": "error", "right": "truncate", "left": "truncate"}
    if truncation.value not in ("error", "left", "right"):
        raise UserError(
            f"{_TRUNCATION} = {truncation.value!r} is not known", source=truncation.source,
            expected="error, left or right", hint="set data.overlong_prompts: error, truncate or drop",
        )
    policy = policies[truncation.value]
    return [replace(truncation, name="data.overlong_prompts", value=policy, text=None)], notes


def _combine_validation_sampling(parts: Parts) -> Combined:
    sampling, temperature = parts.get(_DO_SAMPLE), parts.get(_VAL_TEMPERATURE)
    if sampling is not None and not _boolean(sampling):
        notes = [] if temperature is None else [_note(temperature, f"{_DO_SAMPLE} is false")]
        return [replace(sampling, name="rollout.validation_temperature", value=0.0, text=None)], notes
    notes = [] if sampling is None else [_note(sampling, "rollout.validation_temperature decides")]
    settings = [] if temperature is None else [replace(temperature, name="rollout.validation_temperature")]
    return settings, notes


def _combine_clip(parts: Parts) -> Combined:
    """One number for both sides, which a side's own setting overrules."""
    ratio = parts[_CLIP_RATIO]
    return [replace(ratio, name=f"algorithm.clip_eps_{side}", weak=True) for side in ("low", "high")], []


def _boolean(setting: Setting) -> bool:
    if isinstance(setting.value, bool):
        return setting.value
    raise UserError(
        f"{setting.name} = {setting.value!r} is not accepted", source=setting.source,
        expected="true or false", hint=f"write {setting.name}=true",
    )


def _describe(setting: Setting) -> str:
    return f"{setting.name}={setting.value!r} ({setting.source})"


def _note(setting: Setting, reason: str) -> str:
    return f"ignored: {_describe(setting)}, {reason}"


GROUPS: tuple[AliasGroup, ...] = (
    AliasGroup((_USE_KL_LOSS, _KL_LOSS_COEF, _USE_KL_IN_REWARD, _KL_CTRL_COEF), "algorithm.kl_coef", _combine_kl),
    AliasGroup((_REWARD_PATH, _REWARD_NAME), "reward.function", _combine_reward),
    AliasGroup((_TRUNCATION, _FILTER), "data.overlong_prompts", _combine_overlong),
    AliasGroup((_DO_SAMPLE, _VAL_TEMPERATURE), "rollout.validation_temperature", _combine_validation_sampling),
    AliasGroup((_CLIP_RATIO,), "algorithm.clip_eps_low and algorithm.clip_eps_high", _combine_clip),
)
