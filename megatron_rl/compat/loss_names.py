# SPDX-License-Identifier: Apache-2.0
"""Translation of verl's estimators, policy losses (with dual clip and aggregation) and KL terms.

Two of verl's rules are in its code, not its settings: `vanilla` always has a dual clip, and some losses are averaged
over sequences regardless of `loss_agg_mode`. verl has a KL term in the loss (`use_kl_loss`, `kl_loss_coef`,
`kl_loss_type`) and one in the reward (`use_kl_in_reward`, `kl_penalty`, `kl_ctrl.*`); here a single term has a choice
of place.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megatron_rl.compat.kinds import AliasGroup, Combined, Parts, look_up, note, put, read_boolean
from megatron_rl.config.sources import ASSUMED, Setting, describe
from megatron_rl.types import UserError

_ACTOR = "actor_rollout_ref.actor"
MODEL_PATH = "actor_rollout_ref.model.path"
LOSS_MODE, _DUAL_CLIP = f"{_ACTOR}.policy_loss.loss_mode", f"{_ACTOR}.clip_ratio_c"
_AGGREGATION, _MICRO_BATCH = f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
_COV_RATIOS = {mode: f"{_ACTOR}.policy_loss.{mode}_ratio" for mode in ("clip_cov", "kl_cov")}
_SAME_LOSSES = ("gspo", "cispo", "clip_cov", "kl_cov", "geo_mean", "sapo", "dppo_tv", "dppo_kl")
LOSS_MODES = {"vanilla": "ppo", "gpg": "policy_gradient"} | {name: name for name in _SAME_LOSSES}
AGGREGATIONS = (
    ("token-mean", "token-mean"),
    ("seq-mean-token-mean", "seq-mean-token-mean"),
    ("seq-mean-token-sum", "seq-mean-token-sum"),
    ("seq-mean-token-sum-norm", "constant"),
)
_SAME_ESTIMATORS = (
    "gae grpo rloo reinforce_plus_plus reinforce_plus_plus_baseline remax grpo_passk opo gpg optimal_token_baseline"
)
ESTIMATORS = (
    ("grpo_vectorized", "grpo"),
    ("rloo_vectorized", "rloo"),
    *((name, name) for name in _SAME_ESTIMATORS.split()),
)
CLIP_SIDES = "algorithm.clip_eps_low and algorithm.clip_eps_high"
_DUAL_CLIPPED = ("vanilla", "dppo_tv", "dppo_kl")
_VERL_DUAL_CLIP = 3.0
_BY_SEQUENCE, _SEQUENCE_MEAN = ("gspo", "sapo", "geo_mean"), "seq-mean-token-mean"


def split_clip(given: Setting) -> Combined:
    """Translate a clip range given as one number to both clip bounds, unless a bound has a setting of its own."""
    return (replace(given, name=f"algorithm.clip_eps_{side}", weak=True) for side in ("low", "high"))


def _combine_policy_loss(parts: Parts) -> Combined:
    """Translate the loss, with the dual clip and aggregation that it has in verl."""
    mode = parts.get(LOSS_MODE)
    if mode is not None and mode.layer != ASSUMED:
        hint = "register a loss of yours with algorithm.plugins and name it in algorithm.policy_loss"
        yield look_up(mode, "algorithm.policy_loss", LOSS_MODES.items(), hint)
    dual_clip, own_loss = parts.get(_DUAL_CLIP), parts.get("algorithm.policy_loss")
    has_clip = mode is not None and mode.value in _DUAL_CLIPPED
    if dual_clip is not None and mode is not None and not has_clip:
        yield note(dual_clip, f"{LOSS_MODE} = {mode.value!r} has no dual clip")
    elif dual_clip is not None:
        yield replace(dual_clip, name="algorithm.dual_clip")
    elif mode is not None and has_clip and not (own_loss and own_loss.value != LOSS_MODES[mode.value]):
        yield put(mode, "algorithm.dual_clip", _VERL_DUAL_CLIP, layer=ASSUMED)
        yield (
            f"assumed: {_DUAL_CLIP}={_VERL_DUAL_CLIP} unless algorithm.dual_clip is given, because verl's "
            f"loss {mode.value!r} always has a dual clip"
        )
    yield from _combine_aggregation(parts, mode)
    for owner, name in _COV_RATIOS.items():
        if name in parts and mode is not None and mode.value == owner:
            yield replace(parts[name], name="algorithm.cov_ratio")
        elif name in parts:
            yield note(parts[name], f"it belongs to {LOSS_MODE} = {owner!r}")


def _combine_aggregation(parts: Parts, mode: Setting | None) -> Combined:
    given, target, hint = parts.get(_AGGREGATION), "algorithm.loss_agg_mode", "set algorithm.loss_agg_mode, see --help"
    read = None if given is None else look_up(given, target, AGGREGATIONS, hint)
    if mode is not None and mode.value in _BY_SEQUENCE and (given is None or given.value != _SEQUENCE_MEAN):
        yield put(mode, target, _SEQUENCE_MEAN, layer=ASSUMED)
        why = (
            f"verl's loss {mode.value!r} is always averaged over the tokens of a sequence, then over sequences; the "
            "KL and entropy terms are here as well, and by loss_agg_mode in verl"
        )
        yield note(given, why) if given else f"read as {target}={_SEQUENCE_MEAN}: {why}"
        return
    if read is not None:
        yield read
    if given is not None and given.value == "seq-mean-token-sum-norm":
        count = parts[_MICRO_BATCH].value if _MICRO_BATCH in parts else None
        factor = f"{_MICRO_BATCH} = {count}" if count else "the sequences of a micro batch"
        yield (
            f"read as algorithm.loss_agg_mode=constant: {describe(given)}; constant divides by the number of "
            "sequences too (as Dr. GRPO and TRL do) and verl does not, which makes its loss and gradients larger by "
            f"the factor {factor}"
        )


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
_KL_NAMES = (_USE_KL_LOSS, _KL_LOSS_COEF, _KL_LOSS_TYPE, _USE_KL_IN_REWARD, _KL_PENALTY, *_CONTROLLER)
KL_TYPES = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "abs": "abs"}
_VERL_KL_COEF = 0.001
_VERL_KL_PENALTY = "k1"


def _combine_kl(parts: Parts) -> Combined:
    """Translate the enabled one of verl's two KL terms; yield notes on settings of the other."""
    in_loss, in_reward = (name in parts and read_boolean(parts[name]) for name in (_USE_KL_LOSS, _USE_KL_IN_REWARD))
    if in_loss and in_reward:
        raise UserError(
            f"{_USE_KL_LOSS} and {_USE_KL_IN_REWARD} are both true",
            source=parts[_USE_KL_IN_REWARD].source,
            expected="one KL term, in the loss or in the reward",
            hint=f"set {_USE_KL_IN_REWARD}=false",
        )
    if in_reward:
        switch = parts[_USE_KL_IN_REWARD]
        yield put(switch, "algorithm.kl_in", "reward")
        if _KL_CTRL_COEF not in parts:
            yield put(switch, "algorithm.kl_coef", _VERL_KL_COEF, layer=ASSUMED)
        penalty = parts.get(_KL_PENALTY) or put(switch, _KL_PENALTY, _VERL_KL_PENALTY, layer=ASSUMED)
        yield _read_kl_type(penalty)
        for name in ("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.target_kl"):
            if name in parts:  # verl's target is a KL per token
                yield put(parts[name], "algorithm.kl_target_per", "token", weak=True)
        yield from (replace(parts[name], name=target) for name, target in _CONTROLLER.items() if name in parts)
        yield from _ignore(parts, (_KL_LOSS_COEF, _KL_LOSS_TYPE), f"{_USE_KL_LOSS} is not true")
        return
    use_loss, coef = parts.get(_USE_KL_LOSS), parts.get(_KL_LOSS_COEF)
    if use_loss is not None:
        yield put(use_loss, "algorithm.kl_in", "loss") if in_loss else put(use_loss, "algorithm.kl_coef", 0.0)
    if coef is not None:
        is_off = use_loss is not None and not in_loss
        yield note(coef, f"{_USE_KL_LOSS} is false") if is_off else replace(coef, name="algorithm.kl_coef")
    elif use_loss is not None and in_loss:
        yield put(use_loss, "algorithm.kl_coef", _VERL_KL_COEF, layer=ASSUMED)
        yield f"assumed: {_KL_LOSS_COEF}={_VERL_KL_COEF} unless algorithm.kl_coef is given, because of {_USE_KL_LOSS}"
    if _KL_LOSS_TYPE in parts:
        yield _read_kl_type(parts[_KL_LOSS_TYPE])
    unused, lone = {_KL_PENALTY, *_CONTROLLER}, parts.get(_KL_CTRL_COEF)
    if lone is not None and not parts.keys() & {_USE_KL_LOSS, _KL_LOSS_COEF, _USE_KL_IN_REWARD}:
        unused.remove(_KL_CTRL_COEF)
        yield replace(lone, name="algorithm.kl_coef")
        yield f"read as algorithm.kl_coef: {describe(lone)}, the KL term is in the loss"
    yield from _ignore(parts, unused, f"{_USE_KL_IN_REWARD} is not true")


def _read_kl_type(setting: Setting) -> Setting:
    if setting.value == "full":
        raise UserError(
            f"{setting.name} = 'full' is not supported",
            source=setting.source,
            expected=f"an estimate from the sampled tokens, one of {', '.join(map(repr, KL_TYPES))}",
            hint="it would sum over the vocabulary, with the logits of policy and reference side by side; verl has the "
            "name and no code for it (NotImplementedError). k3 has the same expectation",
        )
    return look_up(setting, "algorithm.kl_type", KL_TYPES.items(), "set algorithm.kl_type: k1, k2, k3 or abs")


def _ignore(parts: Parts, names: Collection[str], reason: str) -> Combined:
    return (note(parts[name], reason) for name in _KL_NAMES if name in parts and name in names)


_CLIP_RATIO = f"{_ACTOR}.clip_ratio"
GROUPS: tuple[AliasGroup, ...] = (
    AliasGroup(
        _KL_NAMES,
        "algorithm.kl_in, kl_coef, kl_type, kl_controller, kl_target (with kl_target_per=token) and kl_horizon",
        _combine_kl,
    ),
    AliasGroup(
        (LOSS_MODE, _DUAL_CLIP, _AGGREGATION, *_COV_RATIOS.values()),
        "algorithm.policy_loss, dual_clip (3.0 in a recipe of verl's that does not write it), "
        "loss_agg_mode (seq-mean-token-mean for gspo, sapo and geo_mean, whatever is written) and cov_ratio",
        _combine_policy_loss,
        reads=(_MICRO_BATCH, "algorithm.policy_loss"),
        targets={_AGGREGATION: "algorithm.loss_agg_mode"},
    ),
    AliasGroup((_CLIP_RATIO,), CLIP_SIDES, lambda parts: split_clip(parts[_CLIP_RATIO])),
)
