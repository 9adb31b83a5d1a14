# SPDX-License-Identifier: Apache-2.0
"""Translation of verl's estimators and policy losses, with dual clip and aggregation.

Two of verl's rules are in its code, not its settings: `vanilla` always has a dual clip, and some losses are averaged
over sequences regardless of `loss_agg_mode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.compat.verl.kl_names import Combined, Parts, look_up, note
from megatron_rl.config.sources import ASSUMED, Setting, describe

_ACTOR = "actor_rollout_ref.actor"
_MODEL_PATH = "actor_rollout_ref.model.path"
_LOSS_MODE, _DUAL_CLIP = f"{_ACTOR}.policy_loss.loss_mode", f"{_ACTOR}.clip_ratio_c"
AGGREGATION, _MICRO_BATCH = f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
_COV_RATIOS = {mode: f"{_ACTOR}.policy_loss.{mode}_ratio" for mode in ("clip_cov", "kl_cov")}
LOSS_NAMES = (_LOSS_MODE, _DUAL_CLIP, AGGREGATION, *_COV_RATIOS.values())
LOSS_READS = (_MICRO_BATCH, "algorithm.policy_loss")
LOSS_MODES = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "cispo": "cispo",
    "gpg": "policy_gradient",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "geo_mean",
    "sapo": "sapo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
}
AGGREGATIONS = (
    ("token-mean", "token-mean"),
    ("seq-mean-token-mean", "seq-mean-token-mean"),
    ("seq-mean-token-sum", "seq-mean-token-sum"),
    ("seq-mean-token-sum-norm", "constant"),
)
ESTIMATORS = (
    ("gae", "gae"),
    ("grpo", "grpo"),
    ("grpo_vectorized", "grpo"),
    ("rloo", "rloo"),
    ("rloo_vectorized", "rloo"),
    ("reinforce_plus_plus", "reinforce_plus_plus"),
    ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline"),
    ("remax", "remax"),
    ("grpo_passk", "grpo_passk"),
    ("opo", "opo"),
    ("gpg", "gpg"),
    ("optimal_token_baseline", "optimal_token_baseline"),
)
_DUAL_CLIPPED = ("vanilla", "dppo_tv", "dppo_kl")
_VERL_DUAL_CLIP = 3.0
_BY_SEQUENCE, _SEQUENCE_MEAN = ("gspo", "sapo", "geo_mean"), "seq-mean-token-mean"


def find_defaults(settings: Sequence[Setting]) -> list[Setting]:
    """Return verl defaults that differ from ours, if the recipe itself names the policy model as verl does."""
    lowest = min((setting.layer for setting in settings), default=ASSUMED)
    is_verl = any(setting.name == _MODEL_PATH and setting.layer == lowest for setting in settings)
    return [Setting(_LOSS_MODE, "vanilla", "verl's default", ASSUMED)] if is_verl else []


def combine_policy_loss(parts: Parts) -> Combined:
    """Translate the loss, with the dual clip and aggregation that it has in verl."""
    mode = parts.get(_LOSS_MODE)
    if mode is not None and mode.layer != ASSUMED:
        yield look_up(
            mode,
            "algorithm.policy_loss",
            LOSS_MODES,
            "register a loss of yours with algorithm.plugins and name it in algorithm.policy_loss",
        )
    for rule in (_combine_dual_clip, _combine_aggregation, _combine_covariance):
        yield from rule(parts, mode)


def _combine_dual_clip(parts: Parts, mode: Setting | None) -> Combined:
    dual_clip, own_loss = parts.get(_DUAL_CLIP), parts.get("algorithm.policy_loss")
    has_clip = mode is not None and mode.value in _DUAL_CLIPPED
    if dual_clip is not None and mode is not None and not has_clip:
        yield note(dual_clip, f"{_LOSS_MODE} = {mode.value!r} has no dual clip")
    elif dual_clip is not None:
        yield replace(dual_clip, name="algorithm.dual_clip")
    elif mode is not None and has_clip and not (own_loss and own_loss.value != LOSS_MODES[mode.value]):
        yield Setting("algorithm.dual_clip", _VERL_DUAL_CLIP, mode.source, ASSUMED)
        yield (
            f"assumed: {_DUAL_CLIP}={_VERL_DUAL_CLIP} unless algorithm.dual_clip is given, because verl's "
            f"loss {mode.value!r} always has a dual clip"
        )


def _combine_aggregation(parts: Parts, mode: Setting | None) -> Combined:
    given = parts.get(AGGREGATION)
    settings = (
        []
        if given is None
        else [
            look_up(
                given, "algorithm.loss_agg_mode", dict(AGGREGATIONS), "set algorithm.loss_agg_mode instead, see --help"
            )
        ]
    )
    if mode is not None and mode.value in _BY_SEQUENCE and (given is None or given.value != _SEQUENCE_MEAN):
        yield Setting("algorithm.loss_agg_mode", _SEQUENCE_MEAN, mode.source, ASSUMED)
        why = (
            f"verl's loss {mode.value!r} is always averaged over the tokens of a sequence, then over sequences; the "
            "KL and entropy terms are here as well, and by loss_agg_mode in verl"
        )
        yield note(given, why) if given else f"read as algorithm.loss_agg_mode={_SEQUENCE_MEAN}: {why}"
        return
    yield from settings
    if given is not None and given.value == "seq-mean-token-sum-norm":
        count = parts[_MICRO_BATCH].value if _MICRO_BATCH in parts else None
        factor = f"{_MICRO_BATCH} = {count}" if count else "the sequences of a micro batch"
        yield (
            f"read as algorithm.loss_agg_mode=constant: {describe(given)}; constant divides by the number of "
            "sequences too (as Dr. GRPO and TRL do) and verl does not, which makes its loss and gradients larger by "
            f"the factor {factor}"
        )


def _combine_covariance(parts: Parts, mode: Setting | None) -> Combined:
    for owner, name in _COV_RATIOS.items():
        if name in parts and mode is not None and mode.value == owner:
            yield replace(parts[name], name="algorithm.cov_ratio")
        elif name in parts:
            yield note(parts[name], f"it belongs to {_LOSS_MODE} = {owner!r}")
