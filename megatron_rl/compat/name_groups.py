# SPDX-License-Identifier: Apache-2.0
"""Translation of verl settings whose meaning depends on each other.

Groups follow verl's rules: `kl_loss_coef` needs `use_kl_loss`, `filter_overlong_prompts` runs before `truncation`,
`do_sample=False` overrides the validation temperature, and a micro-batch of k sequences becomes a budget of k
maximum-length ones. Two rules are in verl's code, not its settings: `vanilla` always has a dual clip, and some losses
are averaged over sequences regardless of `loss_agg_mode`. verl has a KL term in the loss (`use_kl_loss`,
`kl_loss_coef`, `kl_loss_type`) and one in the reward (`use_kl_in_reward`, `kl_penalty`, `kl_ctrl.*`); here a single
term has a choice of place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import yaml

from megatron_rl.compat.kinds import AliasGroup, Combined, Parts, look_up, move, note, put, read_boolean, same
from megatron_rl.config.schema import ActorConfig, CriticConfig, DataConfig, LayoutConfig
from megatron_rl.config.sections import ALL_SETS
from megatron_rl.config.sources import ASSUMED, COMMAND_LINE, Setting, describe
from megatron_rl.types import UserError

_ACTOR = "actor_rollout_ref.actor"
LOSS_MODE, _DUAL_CLIP = f"{_ACTOR}.policy_loss.loss_mode", f"{_ACTOR}.clip_ratio_c"
_AGGREGATION, _SCALE = f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.loss_scale_factor"
_SAME_LOSSES = ("gspo", "cispo", "clip_cov", "kl_cov", "geo_mean", "sapo", "dppo_tv", "dppo_kl", "dro")
LOSS_MODES = {"vanilla": "ppo", "gpg": "policy_gradient"} | {name: name for name in _SAME_LOSSES}
AGGREGATIONS = (
    ("token-mean", "token-mean"),
    ("token-sum", "token-sum"),
    ("seq-mean-token-mean", "seq-mean-token-mean"),
    ("seq-mean-token-sum", "seq-mean-token-sum"),
    ("seq-mean-token-sum-norm", "constant"),
)
_ESTIMATOR, _TOKEN_BASELINE = "algorithm.adv_estimator", "tir_optimal_token_baseline"
_SAME_ESTIMATORS = (
    "gae grpo rloo reinforce_plus_plus reinforce_plus_plus_baseline remax grpo_passk opo gpg gdpo "
    "optimal_token_baseline tir_optimal_token_baseline"
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


def _combine_estimator(parts: Parts) -> Combined:
    """Translate the estimator; verl's optimal token baseline leaves the end of a group's longest response alone."""
    given = parts[_ESTIMATOR]
    ours = next((ours for theirs, ours in ESTIMATORS if same(given.value, theirs)), given.value)
    if LOSS_MODE in parts and ours == "optimal_token_baseline":
        ours = _TOKEN_BASELINE
        yield f"read as {_ESTIMATOR}={ours}, which has verl's advantages: {describe(given)}"
    yield given if same(given.value, ours) else put(given, _ESTIMATOR, ours)


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
    yield from _combine_aggregation(parts, mode)


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
    if given is not None and given.value == "seq-mean-token-sum-norm" and _SCALE not in parts:
        yield (
            f"read as algorithm.loss_agg_mode=constant: {describe(given)}; without {_SCALE} it divides by "
            "data.max_response_length, and verl by the longest response of each micro batch"
        )


_USE_KL_LOSS, _KL_LOSS_COEF = f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef"
_KL_LOSS_TYPE = f"{_ACTOR}.kl_loss_type"
_USE_KL_IN_REWARD, _KL_PENALTY = "algorithm.use_kl_in_reward", "algorithm.kl_penalty"
_CONTROLLER = {
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
    "algorithm.kl_ctrl.horizon": "algorithm.kl_horizon",
}
_KL_CTRL_COEF, _KL_CTRL, _KL_CTRL_TARGET = (f"algorithm.kl_ctrl.{leaf}" for leaf in ("kl_coef", "type", "target_kl"))
_OF_CONTROLLER = (*_CONTROLLER, _KL_CTRL, _KL_CTRL_TARGET)
_KL_NAMES = (_USE_KL_LOSS, _KL_LOSS_COEF, _KL_LOSS_TYPE, _USE_KL_IN_REWARD, _KL_PENALTY, *_OF_CONTROLLER)
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
        for found in _combine_controller(parts):
            yield found
            if isinstance(found, Setting):  # verl's target is a KL per token
                yield put(found, "algorithm.kl_target_per", "token", weak=True)
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
    if _KL_LOSS_TYPE in parts:
        yield _read_kl_type(parts[_KL_LOSS_TYPE])
    unused, lone = {_KL_PENALTY, *_OF_CONTROLLER}, parts.get(_KL_CTRL_COEF)
    if lone is not None and not parts.keys() & {_USE_KL_LOSS, _KL_LOSS_COEF, _USE_KL_IN_REWARD}:
        unused.remove(_KL_CTRL_COEF)
        yield replace(lone, name="algorithm.kl_coef")
        yield f"read as algorithm.kl_coef: {describe(lone)}, the KL term is in the loss"
    yield from _ignore(parts, unused, f"{_USE_KL_IN_REWARD} is not true")


KL_TARGET = 0.1  # of an adaptive controller whose target is not given, as verl's


def _combine_controller(parts: Parts) -> Combined:
    """Translate the kind of the controller, fixed or adaptive, and its target into `algorithm.kl_target`."""
    kind, target = parts.get(_KL_CTRL), parts.get(_KL_CTRL_TARGET)
    values = (("fixed", None), ("adaptive", KL_TARGET), (None, None))
    read = None if kind is None else look_up(kind, "algorithm.kl_target", values, "set algorithm.kl_target, see --help")
    if read is not None and read.value is not None:
        yield replace(read, weak=True) if target is None else replace(target, name=read.name)
    elif target is not None and target.value != KL_TARGET:
        yield note(target, f"{_KL_CTRL} is not adaptive")


def _combine_group_filter(parts: Parts) -> Combined:
    """Translate the switch and the metric of dynamic sampling into one setting."""
    switch, metric = (parts.get(name) for name in _GROUP_FILTER)
    is_on = switch is not None and read_boolean(switch)
    value = True if metric is None else _FILTER_METRICS.get(metric.value, metric.value)
    if switch is not None:
        yield put(switch, "algorithm.dynamic_sampling", is_on and value)
    if metric is not None and not is_on and value is not True:
        yield note(metric, f"{_GROUP_FILTER[0]} is not true")


_GROUP_FILTER = ("algorithm.filter_groups.enable", "algorithm.filter_groups.metric")
_FILTER_METRICS = {None: True, "score": True, "seq_reward": "reward", "seq_final_reward": "reward"}


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


_TRUNCATION, _FILTER = "data.truncation", "data.filter_overlong_prompts"
_REWARD_KEY = "data.reward_fn_key"
_DO_SAMPLE = "actor_rollout_ref.rollout.val_kwargs.do_sample"
_VAL_TEMPERATURE = "actor_rollout_ref.rollout.val_kwargs.temperature"
REWARD_FILES = ("custom_reward_function.path", "reward.custom_reward_function.path")
_RESUME_MODE, _RESUME_PATH = "trainer.resume_mode", "trainer.resume_from_path"
_PROMPT, _RESPONSE = "data.max_prompt_length", "data.max_response_length"


def _reward_group(prefix: str) -> AliasGroup:
    """Build the translation of a reward function, whose `prefix` differs between verl versions."""
    file, name = f"{prefix}.path", f"{prefix}.name"

    def combine(parts: Parts) -> Combined:
        given = {key: part for key, part in parts.items() if part.value is not None}
        if file not in given:
            if name in given and given[name].value != "compute_score":
                yield note(given[name], f"no {file} is given")
            return
        for setting in given.values():
            if not isinstance(setting.value, str):
                raise UserError(
                    f"{setting.name} = {setting.value!r} is not accepted",
                    source=setting.source,
                    expected="text",
                    hint=f"give the file in {file} and the function in {name}",
                )
        function = given[name].value if name in given else "compute_score"
        strongest = max(given.values(), key=lambda one: one.layer)
        yield put(strongest, "reward.function", f"{given[file].value}:{function}")

    return AliasGroup((file, name), "reward.function", combine)


def _reward_model_group(enable: str, path: str) -> AliasGroup:
    """Build the translation of a reward model, whose names differ between verl versions."""

    def combine(parts: Parts) -> Combined:
        switch, given = parts.get(enable), parts.get(path)
        if given is not None and given.value is None:
            given = None
        if switch is None or not read_boolean(switch):
            if given is not None:
                yield note(given, f"{enable} is not true")
            return
        function = next((parts[name] for name in REWARD_FILES if name in parts and parts[name].value), None)
        if function is not None:
            raise UserError(
                f"{enable} = true and {describe(function)}",
                source=switch.source,
                expected="a reward model, or a function: there is no reward model that functions may call",
                hint=f"serve the model, call it in the function, and set {enable}=false",
            )
        if given is None:
            raise UserError(
                f"{enable} = true without {path}",
                source=switch.source,
                expected="the directory of a reward model in HF format",
                hint=f"give {path}",
            )
        yield replace(given, name="reward_model.path")
        lengths = [parts[name].value for name in (_PROMPT, _RESPONSE) if name in parts]
        budget = max(LayoutConfig.max_tokens_per_microbatch, sum(one for one in lengths if isinstance(one, int)))
        yield put(switch, "reward_model.max_tokens_per_microbatch", budget, layer=ASSUMED)
        yield put(switch, "reward.components", ["1.0 model"], weak=True)

    return AliasGroup(
        (enable, path), "reward_model.path and the reward source 'model'", combine, (*REWARD_FILES, _PROMPT, _RESPONSE)
    )


def _combine_overlong(parts: Parts) -> Combined:
    """Translate long-prompt handling; filtering makes truncation ineffective."""
    truncation, filtering = parts.get(_TRUNCATION), parts.get(_FILTER)
    if filtering is not None and read_boolean(filtering):
        yield put(filtering, "data.overlong_prompts", "drop")
        if truncation is not None:
            yield note(truncation, f"{_FILTER} drops long prompts first")
    elif truncation is not None:
        policies = {"error": "error", "left": "truncate", "right": "truncate_right", "middle": "truncate_middle"}
        yield look_up(truncation, "data.overlong_prompts", policies.items(), "set data.overlong_prompts, see --help")


def _combine_reward_key(parts: Parts) -> Combined:
    """Translate `data.reward_fn_key` = "data_source", the column that chooses a rule in verl, to our rule-based reward.

    It is a rule as in earlier versions, to which a reward function or service in the recipe is preferred.
    """
    key = parts[_REWARD_KEY]
    if key.value == "data_source":
        yield put(key, "reward.rule", "by_data_source", weak=True)
    elif key.value is not None:
        raise UserError(
            f"{_REWARD_KEY} = {key.value!r} is not supported",
            source=key.source,
            expected="'data_source': it names the column that chooses the reward",
            hint="rename the column",
        )


_CORRECTION = {
    leaf: f"algorithm.rollout_correction.{leaf}"
    for leaf in ("rollout_is", "rollout_is_threshold", "bypass_mode", "loss_type", "use_policy_gradient")
}
_ENGINE_LOGPROBS = f"{_ACTOR}.use_rollout_log_probs"


def _combine_correction(parts: Parts) -> Combined:
    """Translate the correction of the engine's log-probs, or the choice to learn from them alone (bypass)."""
    weights, bound, bypass, loss, gradient = (parts.get(name) for name in _CORRECTION.values())
    switches = [one for one in (bypass, parts.get(_ENGINE_LOGPROBS)) if one is not None and read_boolean(one)]
    if switches:
        for one, allowed in ((loss, "ppo_clip"), (gradient, False)):
            if one is not None and one.value not in (None, allowed):
                raise UserError(
                    f"{one.name} = {one.value!r} with {switches[0].name} = true is not supported",
                    source=one.source,
                    expected=f"{allowed!r}: there is no REINFORCE with weights in bypass mode",
                    hint=f"remove {one.name}",
                )
        yield put(switches[0], "algorithm.importance_sampling", "bypass")
        yield from (note(one, f"{switches[0].name} is true") for one in (weights, bound) if one and one.value)
        return
    yield from (note(one, "it belongs to bypass_mode") for one in (loss, gradient) if one and one.value)
    lower, _, upper = str(bound.value).rpartition("_") if bound else ("", "", "")
    if weights is not None:
        kinds = [(None, "none"), ("token", "token-mask" if lower else "token-truncate")]
        kinds += [] if lower else [("sequence", "product-truncate")]
        yield look_up(weights, "algorithm.importance_sampling", kinds, "set algorithm.importance_sampling, see --help")
    if bound is not None and bound.value is not None:
        yield from [put(bound, "algorithm.importance_low", _read_number(lower))] if lower else []
        yield put(bound, "algorithm.importance_high", _read_number(upper))


def _read_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # refused as no number


_ASYNC = {leaf: f"async_training.{leaf}" for leaf in ("staleness_threshold", "require_batches", "partial_rollout")} | {
    "trigger_step": "async_training.trigger_parameter_sync_step",
    "total": "rollout.total_rollout_steps",
}
_ASYNC_RANKS = ("rollout.nnodes", "rollout.n_gpus_per_node")
_TRAINER_RANKS = ("trainer.nnodes", "trainer.n_gpus_per_node")
_HYBRID, _MINI_BATCH = "actor_rollout_ref.hybrid_engine", f"{_ACTOR}.ppo_mini_batch_size"


def _combine_async(parts: Parts) -> Combined:
    """Translate verl's asynchronous trainer: a step here is what verl learns between two weight updates."""
    given = [parts[name] for name in (*_ASYNC.values(), *_ASYNC_RANKS) if name in parts]
    hybrid = parts.get(_HYBRID)
    if not given:
        if hybrid is not None and not read_boolean(hybrid):
            raise UserError(
                f"{_HYBRID} = false without rollout.n_gpus_per_node",
                source=hybrid.source,
                expected="true, or ranks of the engines",
                hint="set placement.actor and placement.rollout",
            )
        return
    staleness = max(1, math.ceil(_read_count(parts, _ASYNC["staleness_threshold"], 0.1)))
    factors = [
        _read_count(parts, name, default)
        for name, default in ((_MINI_BATCH, 256), (_ASYNC["require_batches"], 1), (_ASYNC["trigger_step"], 4))
    ]
    trainers, engines = (
        _read_count(parts, nodes, 1) * _read_count(parts, gpus, 8) for nodes, gpus in (_TRAINER_RANKS, _ASYNC_RANKS)
    )
    prompts, total = math.prod(factors), _read_count(parts, _ASYNC["total"], 0)
    is_partial = _ASYNC["partial_rollout"] not in parts or read_boolean(parts[_ASYNC["partial_rollout"]])
    ranks = f"0-{trainers - 1}"
    translated = {
        "schedule.max_staleness": staleness,
        "schedule.updates": "in_flight" if is_partial else "drain",
        "placement.actor": ranks,
        "placement.reference": ranks,
        "placement.rollout": f"{trainers}-{trainers + engines - 1}",
    } | ({"trainer.total_steps": max(1, total // prompts)} if total else {})
    yield from (put(given[0], target, value) for target, value in translated.items())
    yield put(given[0], "data.train_batch_size", prompts, layer=COMMAND_LINE + 1)  # verl does not read the recipe's
    yield (
        f"read as data.train_batch_size={prompts}: {' * '.join(map(str, factors))}, the prompts of a minibatch, the "
        f"minibatches of a step, and the steps between two weight updates; schedule.max_staleness={staleness}"
    )


def _read_count(parts: Parts, name: str, default: float) -> Any:
    value = parts[name].value if name in parts and parts[name].value is not None else default
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UserError(
            f"{name} = {value!r} is no number",
            source=parts[name].source,
            expected="a number of 0 or more",
            hint=f"remove {name}",
        )
    return value


_MTP = "actor_rollout_ref.model.mtp"
_MTP_TRAIN, _MTP_ALONE, _ACTOR_RATE = f"{_MTP}.enable_train", f"{_MTP}.detach_encoder", f"{_ACTOR}.optim.lr"
_MTP_DRAFTS, _MTP_COUNT = f"{_MTP}.enable_rollout", f"{_MTP}.num_speculative_tokens"
_ROLLOUT_NAME = "actor_rollout_ref.rollout.name"


def _combine_mtp(parts: Parts) -> Combined:
    """Translate the training of the MTP layer, which is the same if its loss reaches no other weight."""
    train = parts.get(_MTP_TRAIN)
    if train is None or not read_boolean(train):
        return
    if _MTP_ALONE not in parts or not read_boolean(parts[_MTP_ALONE]):
        found, hint = f"{_MTP_TRAIN} = true without {_MTP_ALONE} = true", f"set {_MTP_ALONE}=true"
        expected = "true: there is no MTP loss that reaches the policy; actor.mtp_lr trains that layer alone"
        raise UserError(found, source=train.source, expected=expected, hint=hint)
    rate = parts[_ACTOR_RATE].value if _ACTOR_RATE in parts else ActorConfig.lr
    yield put(train, "actor.mtp_lr", rate)
    yield f"read as actor.mtp_lr={rate}: AdamW's step is the same with any mtp_loss_scaling_factor"


def _combine_drafts(parts: Parts) -> Combined:
    """Translate drafts of the MTP layer, which only vLLM makes here."""
    drafts, count = parts.get(_MTP_DRAFTS), parts.get(_MTP_COUNT)
    if drafts is None or not read_boolean(drafts):
        return
    if _ROLLOUT_NAME in parts and parts[_ROLLOUT_NAME].value != "vllm":
        yield note(drafts, "this engine drafts no tokens; samples have the same distribution with drafts")
        return
    yield put(drafts, "rollout.draft_tokens", 1 if count is None else count.value)


def _combine_validation_sampling(parts: Parts) -> Combined:
    sampling, temperature = parts.get(_DO_SAMPLE), parts.get(_VAL_TEMPERATURE)
    if sampling is not None and not read_boolean(sampling):
        yield put(sampling, "rollout.validation_temperature", 0.0)
        if temperature is not None and temperature.value != 0:
            yield note(temperature, f"{_DO_SAMPLE} is false")
    elif temperature is not None:
        yield replace(temperature, name="rollout.validation_temperature")
    elif sampling is not None:
        yield note(sampling, "rollout.validation_temperature decides")


def _combine_resume(parts: Parts) -> Combined:
    mode, path = parts.get(_RESUME_MODE), parts.get(_RESUME_PATH)
    if path is not None and path.value in (None, False):
        path = None
    if mode is not None and mode.value == "resume_path":
        if path is None:
            raise UserError(
                f"{_RESUME_MODE} = 'resume_path' without {_RESUME_PATH}",
                source=mode.source,
                expected="the directory of a checkpoint",
                hint=f"give {_RESUME_PATH}",
            )
        yield replace(path, name="checkpoint.resume")
        return
    if path is not None:
        yield note(path, f"{_RESUME_MODE} is not 'resume_path'")
    if mode is not None:
        modes = (("auto", "auto"), ("disable", "never"))
        yield look_up(
            mode, "checkpoint.resume", modes, "give resume_path with trainer.resume_from_path, or one of them"
        )


_SHARING = (
    "ulysses_sequence_parallel_size",
    "fsdp_config.ulysses_sequence_parallel_size",
    "veomni.ulysses_parallel_size",
    "megatron.context_parallel_size",
)


def _list_sharing(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{leaf}" for leaf in _SHARING)


def _read_budget(parts: Parts, tokens: Setting, sharing: Sequence[str], target: str) -> Setting:
    """Return a role's token budget: the tokens of a GPU times the ranks that share a sequence."""
    counts = [parts[name].value for name in sharing if name in parts]
    ranks = max((count for count in counts if isinstance(count, int)), default=1)
    is_scaled = isinstance(tokens.value, int) and ranks > 1
    return replace(tokens, name=target, value=tokens.value * ranks if is_scaled else tokens.value)


def budget_group(
    names: tuple[str, str, str], role: str, sharing: tuple[str, ...], longest: tuple[str, ...] = (_PROMPT, _RESPONSE)
) -> AliasGroup:
    """Build the translation of a role's micro-batch settings to its token budget.

    Args:
        names: of the tokens of a GPU, the choice of them, and the sequences of a GPU.
        sharing: names of the number of ranks that share a sequence.
        longest: names of the lengths that make the longest sequence.
    """
    (tokens, dynamic, sequences), target = names, f"{role}.max_tokens_per_microbatch"

    def combine(parts: Parts) -> Combined:
        given = {name: parts[name] for name in (tokens, sequences) if name in parts and parts[name].value is not None}
        is_dynamic = dynamic in parts and read_boolean(parts[dynamic])
        if sequences not in given or (is_dynamic and tokens in given):
            if tokens in given:
                yield _read_budget(parts, given[tokens], sharing, target)
            if sequences in given:
                yield note(given[sequences], f"{dynamic} is true")
            return
        count = given[sequences]
        lengths = [
            parts[name].value if name in parts else getattr(DataConfig, name.partition(".")[2]) for name in longest
        ]
        if not all(isinstance(number, int) and number > 0 for number in (count.value, *lengths)):
            raise UserError(
                f"{sequences} = {count.value!r} with {' and '.join(longest)} = {lengths}",
                source=count.source,
                expected="integers of 1 or more",
                hint=f"set {target} instead",
            )
        budget = count.value * sum(lengths)
        yield put(count, target, budget, weak=True)
        yield (
            f"read as {target} = {count.value} * ({' + '.join(map(str, lengths))}) = {budget} tokens: "
            f"{describe(count)} of the longest sequences"
        )
        if tokens in given:
            yield note(given[tokens], f"{dynamic} is not true")

    return AliasGroup(
        names,
        f"{target}: the number of tokens of a GPU times the ranks that share a sequence, or that of sequences times "
        "the longest one",
        combine,
        reads=(*longest, *sharing),
    )


def sequence_parallel_group(engine: str, role: str) -> AliasGroup:
    """Build the translation of a role's sequence parallelism, which has no effect without tensor parallelism."""
    name, target = f"{engine}.sequence_parallel", f"{role}.sequence_parallel"
    sizes = (f"{engine}.tensor_model_parallel_size", f"{role}.tensor_model_parallel_size")

    def combine(parts: Parts) -> Combined:
        given = parts[name]
        size = max((parts[size] for size in sizes if size in parts), key=lambda part: part.layer, default=None)
        is_alone = read_boolean(given) and (size is None or size.value == 1)
        yield note(given, "there is one tensor parallel rank") if is_alone else replace(given, name=target)

    return AliasGroup(
        (name,), f"{target}, where there is tensor parallelism", combine, reads=sizes, targets={name: target}
    )


def betas_group(optim: str, role: str) -> AliasGroup:
    """Build the translation of Adam's two moments, a list in verl."""
    name = f"{optim}.betas"

    def combine(parts: Parts) -> Combined:
        given = parts[name]
        betas = yaml.safe_load(given.value) if isinstance(given.value, str) else given.value  # a quoted list
        if not isinstance(betas, list) or len(betas) != 2:
            hint = f"set {role}.adam_beta1 and {role}.adam_beta2"
            raise UserError(f"{name} = {given.value!r}", source=given.source, expected="two numbers", hint=hint)
        for i, beta in enumerate(betas, start=1):
            yield put(given, f"{role}.adam_beta{i}", beta)

    return AliasGroup((name,), f"{role}.adam_beta1 and {role}.adam_beta2", combine)


def rate_group(optim: str, role: str) -> AliasGroup:
    """Build the translation of the warm-up, in steps or as a share of all, and of the end of the decay."""
    steps, styles = f"{optim}.lr_decay_steps", (f"{optim}.lr_decay_style", f"{role}.lr_decay_style")
    warmup, share, least = (f"{optim}.{leaf}" for leaf in ("lr_warmup_steps", "lr_warmup_steps_ratio", "min_lr_ratio"))

    def combine(parts: Parts) -> Combined:
        counts = [parts[name] for name in (warmup, share) if name in parts and parts[name].value is not None]
        chosen = next((one for one in counts if one.name == share or one.value != -1), None)
        if chosen is not None and chosen.name == share and not 0 <= _read_count(parts, share, 0) < 1:
            hint, expected = f"give the steps: {role}.lr_warmup_steps", "a share of the steps, below 1"
            raise UserError(f"{share} = {chosen.value!r}", source=chosen.source, expected=expected, hint=hint)
        if counts:
            yield put(chosen or counts[0], f"{role}.lr_warmup_steps", 0 if chosen is None else chosen.value)
        if least in parts and parts[least].value:
            default = (CriticConfig if role == "critic" else ActorConfig).lr
            peak = parts[f"{optim}.lr"].value if f"{optim}.lr" in parts else default
            yield put(parts[least], f"{role}.min_lr", float(f"{float(parts[least].value) * float(peak):.9g}"))
        given = parts.get(steps)
        if given is not None and given.value is not None:
            if any(name in parts and parts[name].value != "constant" for name in styles):
                expected, found = "null: there is no decay that ends before the run", f"{steps} = {given.value!r}"
                raise UserError(found, source=given.source, expected=expected, hint=f"remove {steps}")
            yield note(given, "the learning rate is constant")

    return AliasGroup(
        (steps, warmup, share, least),
        f"{role}.lr_warmup_steps (steps, or a share of all), {role}.min_lr (a share of the peak in verl); a number of "
        "steps of the decay is accepted with a constant rate",
        combine,
        reads=(*styles, f"{optim}.lr"),
        targets={warmup: f"{role}.lr_warmup_steps"},
    )


def lora_group(prefix: str, role: str) -> AliasGroup:
    """Build the translation of a role's adapters, whose rank and scale have two names each: FSDP's and Megatron's."""
    pairs = [(f"{prefix}.lora{mark}rank", f"{prefix}.lora{mark}alpha") for mark in "_."]
    merge = f"{prefix}.lora.merge"

    def combine(parts: Parts) -> Combined:
        given = [pair for pair in pairs if pair[0] in parts]
        used = [pair for pair in given if parts[pair[0]].value] or given[:1] or pairs
        for rank, alpha in used:
            if rank in parts:
                yield replace(parts[rank], name=f"{role}.lora.rank")
            if alpha in parts and (rank not in parts or parts[rank].value):
                yield replace(parts[alpha], name=f"{role}.lora.alpha")
        if merge in parts and any(parts[rank].value for rank, _ in given):
            yield look_up(parts[merge], "hybrid.lora", ((True, "merge"), (False, "adapter")), "set hybrid.lora")

    names = (*(name for pair in pairs for name in pair), merge)
    return AliasGroup(names, f"{role}.lora.rank, {role}.lora.alpha and hybrid.lora", combine)


def _overlong_buffer_group(prefix: str) -> AliasGroup:
    """Build the translation of DAPO's penalty for overlong responses, whose `prefix` differs between verl versions."""
    enable, length, penalty, log = (f"{prefix}.{leaf}" for leaf in ("enable", "len", "penalty_factor", "log"))

    def combine(parts: Parts) -> Combined:
        is_on = enable in parts and read_boolean(parts[enable])
        if is_on and length not in parts:
            raise UserError(
                f"{enable} = true without {length}",
                source=parts[enable].source,
                expected="the tokens before max_response_length that are punished",
                hint=f"give {length}",
            )
        for name, target in ((length, "reward.overlong_buffer_length"), (penalty, "reward.overlong_penalty")):
            if name in parts:
                yield replace(parts[name], name=target) if is_on else note(parts[name], f"{enable} is not true")
        if log in parts:
            yield note(parts[log], "the reward lost is always logged")

    return AliasGroup(
        (enable, length, penalty, log), "reward.overlong_buffer_length and reward.overlong_penalty", combine
    )


def trackers_group(name: str, nothing: str = "") -> AliasGroup:
    """Build the translation of a list of places for the metrics; the value `nothing` names none."""

    def combine(parts: Parts) -> Combined:
        given = parts[name]
        places = given.value if isinstance(given.value, list) else [given.value]
        trackers = [place for place in places if place in _TRACKERS]
        unknown = [str(place) for place in places if place not in (*_ALWAYS, *_TRACKERS, nothing, None)]
        if given.value is not None and (trackers or not unknown):
            yield put(given, "observability.trackers", trackers, weak=True)
        if unknown:
            yield note(given, f"there is no tracker {' and no '.join(unknown)} (docs/watching.md#trackers)")

    meaning = f"observability.trackers with {', '.join(_TRACKERS)}; the console and metrics.jsonl are always there"
    return AliasGroup((name,), meaning, combine)


def _offload_group(prefix: str, role: str) -> AliasGroup:
    """Build the translation of what of a role's optimizer is on the host."""
    whole, options = f"{prefix}.megatron.optimizer_offload", f"{prefix}.optim.override_optimizer_config"
    always, share, target = (
        f"{options}.optimizer_cpu_offload",
        f"{options}.optimizer_offload_fraction",
        f"{role}.offload_optimizer",
    )

    def combine(parts: Parts) -> Combined:
        values = {name: part.value for name, part in parts.items()}
        is_always = values.get(always) is True and values.get(share) not in (None, 0)  # megatron-core's share is 0
        if is_always:
            yield put(parts[always], target, "stream")
        elif always in parts:
            yield note(parts[always], f"{share} is not above 0" if parts[always].value else "it is the default")
        if share in parts:
            why = "all moments are on the host, and updated on the GPU" if is_always else f"{always} is not true"
            yield note(parts[share], why)
        if whole in parts:
            why = "the moments are always on the host"
            yield note(parts[whole], why) if is_always else replace(parts[whole], name=target)

    return AliasGroup(
        (whole, always, share),
        f"{target}, stream where moments are always on the host",
        combine,
        targets={whole: target},
    )


_CLIP_RATIO = f"{_ACTOR}.clip_ratio"
_TRACKERS, _ALWAYS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab"), ("console", "file")
_ROLES = (("actor_rollout_ref.actor", "actor"), ("critic", "critic"))
_TOP = "actor_rollout_ref.rollout.val_kwargs.top_p actor_rollout_ref.rollout.val_kwargs.top_k "
_TOP += "rollout.validation_top_p rollout.validation_top_k"


def _set_for_all(part: Setting, sets: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling of validation sets with `top_p` or `top_k` of all sets."""
    leaf = part.name[-len("top_p") :]
    value = -1 if leaf == "top_k" and part.value == 0 else part.value  # 0 is verl's -1
    is_default = same(value, {"top_p": 1.0, "top_k": -1}[leaf])
    return sets if is_default else sets | {ALL_SETS: sets.get(ALL_SETS, {}) | {leaf: value}}


GROUPS: tuple[AliasGroup, ...] = (
    AliasGroup(
        _KL_NAMES,
        "algorithm.kl_in, kl_coef, kl_type, kl_target (if kl_ctrl.type is adaptive; per token) and kl_horizon",
        _combine_kl,
    ),
    AliasGroup(
        (_ESTIMATOR,),
        f"algorithm.adv_estimator: {', '.join(_SAME_ESTIMATORS.split())}; grpo_vectorized is grpo, rloo_vectorized is "
        f"rloo, and in a recipe of verl's optimal_token_baseline is {_TOKEN_BASELINE}",
        _combine_estimator,
        reads=(LOSS_MODE,),
        targets={_ESTIMATOR: _ESTIMATOR},
    ),
    AliasGroup(
        (LOSS_MODE, _DUAL_CLIP, _AGGREGATION),
        "algorithm.policy_loss, dual_clip (3.0 in a recipe of verl's that does not write it), "
        "loss_agg_mode (seq-mean-token-mean for gspo, sapo and geo_mean, whatever is written)",
        _combine_policy_loss,
        reads=(_SCALE, "algorithm.policy_loss"),
        targets={_AGGREGATION: "algorithm.loss_agg_mode"},
    ),
    *(_offload_group(prefix, role) for prefix, role in _ROLES),
    move(_TOP, "rollout.validation_sets", _set_for_all, {}),
    AliasGroup(
        _GROUP_FILTER,
        "algorithm.dynamic_sampling: true, or the metric; score is true, seq_reward and seq_final_reward are reward",
        _combine_group_filter,
        targets={_GROUP_FILTER[0]: "algorithm.dynamic_sampling"},
    ),
    AliasGroup((_CLIP_RATIO,), CLIP_SIDES, lambda parts: split_clip(parts[_CLIP_RATIO])),
    _reward_model_group("reward_model.enable", "reward_model.model.path"),
    _reward_model_group("reward.reward_model.enable", "reward.reward_model.model_path"),
    *(_reward_group(file.removesuffix(".path")) for file in REWARD_FILES),
    AliasGroup(
        (*_CORRECTION.values(), _ENGINE_LOGPROBS),
        "algorithm.importance_sampling (bypass: bypass_mode or use_rollout_log_probs), importance_low and "
        "importance_high",
        _combine_correction,
    ),
    AliasGroup(
        (*_ASYNC.values(), *_ASYNC_RANKS, _HYBRID),
        "schedule.max_staleness, data.train_batch_size (the prompts between two weight updates), trainer.total_steps, "
        "placement.actor, placement.reference and placement.rollout",
        _combine_async,
        reads=(*_TRAINER_RANKS, _MINI_BATCH, "data.train_batch_size"),
    ),
    AliasGroup((_MTP_TRAIN, _MTP_ALONE), "actor.mtp_lr, the actor's rate", _combine_mtp, reads=(_ACTOR_RATE,)),
    AliasGroup((_MTP_DRAFTS, _MTP_COUNT), "rollout.draft_tokens (vllm)", _combine_drafts, reads=(_ROLLOUT_NAME,)),
    AliasGroup((_REWARD_KEY,), "reward.function=by_data_source, unless another is given", _combine_reward_key),
    AliasGroup((_TRUNCATION, _FILTER), "data.overlong_prompts", _combine_overlong),
    AliasGroup((_DO_SAMPLE, _VAL_TEMPERATURE), "rollout.validation_temperature", _combine_validation_sampling),
    trackers_group("trainer.logger"),
    AliasGroup((_RESUME_MODE, _RESUME_PATH), "checkpoint.resume", _combine_resume),
    *(
        _overlong_buffer_group(place)
        for place in (
            "reward_model.overlong_buffer",
            "reward_model.reward_kwargs.overlong_buffer_cfg",
            "reward.reward_kwargs.overlong_buffer_cfg",
        )
    ),
    *(
        budget_group(
            (
                f"{prefix}.ppo_max_token_len_per_gpu",
                f"{prefix}.use_dynamic_bsz",
                f"{prefix}.ppo_micro_batch_size_per_gpu",
            ),
            role,
            _list_sharing(prefix),
        )
        for prefix, role in _ROLES
    ),
    *(group(f"{prefix}.optim", role) for group in (betas_group, rate_group) for prefix, role in _ROLES),
    *(lora_group(prefix, role) for prefix, role in (("actor_rollout_ref.model", "actor"), ("critic.model", "critic"))),
    *(
        sequence_parallel_group(f"{prefix}.megatron", role)
        for prefix, role in (*_ROLES, ("reward_model", "reward_model"))
    ),
)
