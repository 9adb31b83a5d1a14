# SPDX-License-Identifier: Apache-2.0
"""Translation of verl settings whose meaning depends on each other.

Groups follow verl's rules: `kl_loss_coef` needs `use_kl_loss`, `filter_overlong_prompts` runs before `truncation`,
`do_sample=False` overrides the validation temperature, and a micro-batch of k sequences becomes a budget of k
maximum-length ones. Losses and KL are in `loss_names.py`.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.compat import loss_names
from megatron_rl.compat.kinds import AliasGroup, Combined, Parts, look_up, note, put, read_boolean
from megatron_rl.config.schema import DataConfig
from megatron_rl.config.sources import describe
from megatron_rl.types import UserError

_REWARD_PATH, _REWARD_NAME = "custom_reward_function.path", "custom_reward_function.name"
_TRUNCATION, _FILTER = "data.truncation", "data.filter_overlong_prompts"
_REWARD_KEY = "data.reward_fn_key"
_DO_SAMPLE = "actor_rollout_ref.rollout.val_kwargs.do_sample"
_VAL_TEMPERATURE = "actor_rollout_ref.rollout.val_kwargs.temperature"
_MODEL_REWARD, _MODEL_REWARD_PATH = "reward_model.enable", "reward_model.model.path"
_RESUME_MODE, _RESUME_PATH = "trainer.resume_mode", "trainer.resume_from_path"
_PROMPT, _RESPONSE = "data.max_prompt_length", "data.max_response_length"


def _combine_reward(parts: Parts) -> Combined:
    path, name = parts.get(_REWARD_PATH), parts.get(_REWARD_NAME)
    if path is None or path.value is None:
        if name is not None and name.value is not None:
            yield note(name, f"no {_REWARD_PATH} is given")
        return
    for setting in parts.values():
        if not isinstance(setting.value, str):
            raise UserError(
                f"{setting.name} = {setting.value!r} is not accepted",
                source=setting.source,
                expected="text",
                hint="give the file in custom_reward_function.path and the function in custom_reward_function.name",
            )
    function = "compute_score" if name is None else name.value
    yield put(max(parts.values(), key=lambda one: one.layer), "reward.function", f"{path.value}:{function}")


def _combine_reward_model(parts: Parts) -> Combined:
    enable, path = parts.get(_MODEL_REWARD), parts.get(_MODEL_REWARD_PATH)
    if path is not None and path.value is None:
        path = None
    if enable is None or not read_boolean(enable):
        if path is not None:
            yield note(path, f"{_MODEL_REWARD} is not true")
        return
    if path is None:
        raise UserError(
            f"{_MODEL_REWARD} = true without {_MODEL_REWARD_PATH}",
            source=enable.source,
            expected="the directory of a reward model in HF format",
            hint=f"give {_MODEL_REWARD_PATH}",
        )
    yield replace(path, name="reward_model.path")
    yield put(enable, "reward.components", ["1.0 model"], weak=True)


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

    A reward function or service in the recipe takes precedence.
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


def _budget_group(prefix: str, role: str) -> AliasGroup:
    """Build the translation of a role's micro-batch settings, in tokens or sequences, to its token budget."""
    tokens, dynamic = f"{prefix}.ppo_max_token_len_per_gpu", f"{prefix}.use_dynamic_bsz"
    sequences, target = f"{prefix}.ppo_micro_batch_size_per_gpu", f"{role}.max_tokens_per_microbatch"

    def combine(parts: Parts) -> Combined:
        given = {name: parts[name] for name in (tokens, sequences) if name in parts and parts[name].value is not None}
        is_dynamic = dynamic in parts and read_boolean(parts[dynamic])
        if sequences not in given or (is_dynamic and tokens in given):
            if tokens in given:
                yield replace(given[tokens], name=target)
            if sequences in given:
                yield note(given[sequences], f"{dynamic} is true")
            return
        count = given[sequences]
        lengths = [
            parts[name].value if name in parts else getattr(DataConfig, name.partition(".")[2])
            for name in (_PROMPT, _RESPONSE)
        ]
        if not all(isinstance(number, int) and number > 0 for number in (count.value, *lengths)):
            raise UserError(
                f"{sequences} = {count.value!r} with {_PROMPT} = {lengths[0]!r} and {_RESPONSE} = {lengths[1]!r}",
                source=count.source,
                expected="integers of 1 or more",
                hint=f"set {target} instead",
            )
        budget = count.value * sum(lengths)
        yield put(count, target, budget, weak=True)
        yield (
            f"read as {target} = {count.value} * ({lengths[0]} + {lengths[1]}) = {budget} tokens: "
            f"{describe(count)} of the longest sequences"
        )
        if tokens in given:
            yield note(given[tokens], f"{dynamic} is not true")

    return AliasGroup(
        (tokens, dynamic, sequences),
        f"{target}: the number of tokens, or that of sequences times the longest prompt and response",
        combine,
        reads=(_PROMPT, _RESPONSE),
    )


def _sequence_parallel_group(prefix: str, role: str) -> AliasGroup:
    """Build the translation of a role's sequence parallelism, which has no effect without tensor parallelism."""
    name, target = f"{prefix}.megatron.sequence_parallel", f"{role}.sequence_parallel"
    sizes = (f"{prefix}.megatron.tensor_model_parallel_size", f"{role}.tensor_model_parallel_size")

    def combine(parts: Parts) -> Combined:
        given = parts[name]
        size = max((parts[size] for size in sizes if size in parts), key=lambda part: part.layer, default=None)
        is_alone = read_boolean(given) and (size is None or size.value == 1)
        yield note(given, "there is one tensor parallel rank") if is_alone else replace(given, name=target)

    return AliasGroup(
        (name,), f"{target}, where there is tensor parallelism", combine, reads=sizes, targets={name: target}
    )


def _betas_group(prefix: str, role: str) -> AliasGroup:
    name = f"{prefix}.optim.betas"

    def combine(parts: Parts) -> Combined:
        given = parts[name]
        if not isinstance(given.value, list) or len(given.value) != 2:
            raise UserError(
                f"{name} = {given.value!r}",
                source=given.source,
                expected="two numbers",
                hint=f"set {role}.adam_beta1 and {role}.adam_beta2",
            )
        for i, beta in enumerate(given.value, start=1):
            yield put(given, f"{role}.adam_beta{i}", beta)

    return AliasGroup((name,), f"{role}.adam_beta1 and {role}.adam_beta2", combine)


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


_ROLES = (("actor_rollout_ref.actor", "actor"), ("critic", "critic"))
GROUPS: tuple[AliasGroup, ...] = (
    *loss_names.GROUPS,
    AliasGroup((_REWARD_PATH, _REWARD_NAME), "reward.function", _combine_reward),
    AliasGroup(
        (_MODEL_REWARD, _MODEL_REWARD_PATH), "reward_model.path and the reward source 'model'", _combine_reward_model
    ),
    AliasGroup((_REWARD_KEY,), "reward.rule=by_data_source, unless the recipe says otherwise", _combine_reward_key),
    AliasGroup((_TRUNCATION, _FILTER), "data.overlong_prompts", _combine_overlong),
    AliasGroup((_DO_SAMPLE, _VAL_TEMPERATURE), "rollout.validation_temperature", _combine_validation_sampling),
    AliasGroup((_RESUME_MODE, _RESUME_PATH), "checkpoint.resume", _combine_resume),
    *(
        _overlong_buffer_group(f"reward_model.{place}")
        for place in ("overlong_buffer", "reward_kwargs.overlong_buffer_cfg")
    ),
    *(_budget_group(prefix, role) for prefix, role in _ROLES),
    *(_betas_group(prefix, role) for prefix, role in _ROLES),
    *(_sequence_parallel_group(prefix, role) for prefix, role in (*_ROLES, ("reward_model", "reward_model"))),
)
