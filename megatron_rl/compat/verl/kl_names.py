# SPDX-License-Identifier: Apache-2.0
"""Translation of verl's two KL terms.

verl has a KL term in the loss (`use_kl_loss`, `kl_loss_coef`, `kl_loss_type`) and one in the reward
(`use_kl_in_reward`, `kl_penalty`, `kl_ctrl.*`); here a single term has a choice of place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from megatron_rl.config.sources import ASSUMED, Setting, describe
from megatron_rl.types import UserError

Parts = dict[str, Setting]
Combined = Iterator[Setting | str]  # translated settings and notes

_ACTOR = "actor_rollout_ref.actor"
_USE_KL_LOSS, _KL_LOSS_COEF = f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef"
_KL_LOSS_TYPE = f"{_ACTOR}.kl_loss_type"
_USE_KL_IN_REWARD, _KL_PENALTY = "algorithm.use_kl_in_reward", "algorithm.kl_penalty"
_CONTROLLER = {
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
    "algorithm.kl_ctrl.type": "algorithm.kl_controller",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl_target",
    "algorithm.kl_ctrl.horizon": "algorithm.kl_horizon",
}
_KL_CTRL_COEF = "algorithm.kl_ctrl.kl_coef"
KL_NAMES = (_USE_KL_LOSS, _KL_LOSS_COEF, _KL_LOSS_TYPE, _USE_KL_IN_REWARD, _KL_PENALTY, *_CONTROLLER)
KL_TYPES = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "abs": "abs"}
_VERL_KL_COEF = 0.001
_VERL_KL_PENALTY = "k1"


def combine_kl(parts: Parts) -> Combined:
    """Translate the enabled KL term; report settings of the disabled one."""
    in_loss, in_reward = (name in parts and read_boolean(parts[name]) for name in (_USE_KL_LOSS, _USE_KL_IN_REWARD))
    if in_loss and in_reward:
        raise UserError(
            f"{_USE_KL_LOSS} and {_USE_KL_IN_REWARD} are both true",
            source=parts[_USE_KL_IN_REWARD].source,
            expected="one KL term, in the loss or in the reward",
            hint=f"set {_USE_KL_IN_REWARD}=false",
        )
    if in_reward:
        yield from _combine_kl_in_reward(parts)
        yield from _ignore(parts, (_KL_LOSS_COEF, _KL_LOSS_TYPE), f"{_USE_KL_LOSS} is not true")
        return
    yield from _combine_kl_loss(parts.get(_USE_KL_LOSS), parts.get(_KL_LOSS_COEF))
    if _KL_LOSS_TYPE in parts:
        yield _read_kl_type(parts[_KL_LOSS_TYPE])
    unused, lone = {_KL_PENALTY, *_CONTROLLER}, parts.get(_KL_CTRL_COEF)
    if lone is not None and not parts.keys() & {_USE_KL_LOSS, _KL_LOSS_COEF, _USE_KL_IN_REWARD}:
        unused.remove(_KL_CTRL_COEF)
        yield replace(lone, name="algorithm.kl_coef")
        yield f"read as algorithm.kl_coef: {describe(lone)}, the KL term is in the loss"
    yield from _ignore(parts, unused, f"{_USE_KL_IN_REWARD} is not true")


def _combine_kl_in_reward(parts: Parts) -> Combined:
    switch = parts[_USE_KL_IN_REWARD]
    yield replace(switch, name="algorithm.kl_in", value="reward", text=None)
    for name, target, assumed in (
        (_KL_CTRL_COEF, "algorithm.kl_coef", _VERL_KL_COEF),
        (_KL_PENALTY, "algorithm.kl_type", _VERL_KL_PENALTY),
    ):
        if name not in parts:
            yield replace(switch, name=target, value=assumed, layer=ASSUMED, text=None)
    if _KL_PENALTY in parts:
        yield _read_kl_type(parts[_KL_PENALTY])
    for name in ("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.target_kl"):
        if name in parts:  # verl's target is a KL per token
            yield replace(parts[name], name="algorithm.kl_target_per", value="token", text=None, weak=True)
    for name, target in _CONTROLLER.items():
        if name in parts:
            yield replace(parts[name], name=target)


def _combine_kl_loss(use_loss: Setting | None, coef: Setting | None) -> Combined:
    if use_loss is not None and not read_boolean(use_loss):
        yield replace(use_loss, name="algorithm.kl_coef", value=0.0, text=None)
        if coef is not None:
            yield note(coef, f"{_USE_KL_LOSS} is false")
        return
    if use_loss is not None:
        yield replace(use_loss, name="algorithm.kl_in", value="loss", text=None)
    if coef is not None:
        yield replace(coef, name="algorithm.kl_coef")
    elif use_loss is not None:
        yield replace(use_loss, name="algorithm.kl_coef", value=_VERL_KL_COEF, layer=ASSUMED, text=None)
        yield f"assumed: {_KL_LOSS_COEF}={_VERL_KL_COEF} unless algorithm.kl_coef is given, because of {_USE_KL_LOSS}"


def _read_kl_type(setting: Setting) -> Setting:
    if setting.value == "full":
        raise UserError(
            f"{setting.name} = 'full' is not supported",
            source=setting.source,
            expected=f"an estimate from the sampled tokens, one of {', '.join(map(repr, KL_TYPES))}",
            hint="it would sum over the vocabulary, with the logits of policy and reference side by side; verl has the "
            "name and no code for it (NotImplementedError). k3 has the same expectation",
        )
    return look_up(setting, "algorithm.kl_type", KL_TYPES, "set algorithm.kl_type: k1, k2, k3 or abs")


def look_up(setting: Setting, target: str, values: Mapping[str, str], hint: str) -> Setting:
    """Translate a value by a complete table of verl's values (UserError for others)."""
    if not isinstance(setting.value, str) or setting.value not in values:
        raise UserError(
            f"{setting.name} = {setting.value!r} is not known",
            source=setting.source,
            expected=f"one of {', '.join(map(repr, values))} (read as {target})",
            hint=hint,
        )
    return replace(setting, name=target, value=values[setting.value], text=None)


def read_boolean(setting: Setting) -> bool:
    """Return the value of a switch; null is false (UserError if not boolean)."""
    if setting.value is None or isinstance(setting.value, bool):
        return bool(setting.value)
    raise UserError(
        f"{setting.name} = {setting.value!r} is not accepted",
        source=setting.source,
        expected="true or false",
        hint=f"write {setting.name}=true",
    )


def note(setting: Setting, reason: str) -> str:
    """Format the note for a setting without effect."""
    return f"ignored: {describe(setting)}, {reason}"


def _ignore(parts: Parts, names: Collection[str], reason: str) -> Combined:
    return (note(parts[name], reason) for name in KL_NAMES if name in parts and name in names)
