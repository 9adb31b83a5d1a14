# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of reward sources, and checks of ground truths for it; pure except for loading user code.

    reward = sum_i weight_i * score_i  + sum_m weight_m * score_m of reward models  + soft overlong punishment

Reward models score elsewhere and collectively: `add_model_scores` of `training/roles` follows `compute_reward`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, product

from megatron_rl.config.schema import REWARD_MODEL, RewardConfig
from megatron_rl.rewards.answers import RESTATES, extract_answer
from megatron_rl.rewards.scoring import (
    COUNTS,
    LARGEST,
    RULES,
    RewardFunction,
    Rule,
    Score,
    describe_rollout,
    list_truths,
    shorten,
)
from megatron_rl.types import SERVICE_FAILURES, Prompt, Rollout, UserError

OVERLONG = "overlong"
# Counts of failures; their names have no source prefix in a sum.
_COUNTED = (SERVICE_FAILURES, *COUNTS)
# Names of other metrics reward/<name>.
_RESERVED = (REWARD_MODEL, OVERLONG, RESTATES, *_COUNTED, "mean", "uninformative_groups")


@dataclass(frozen=True)
class SourceSpec:
    """One reward source.

    Attributes:
        name: of its component in the logs.
        target: a rule, "path.py:name", a service URL, or a reward model, "model" or "model:NAME".
        setting: config setting that names the target, for errors.
        function: `None` for a service or model.
        takes_group: see `calls.takes_group`.
    """

    name: str
    weight: float
    target: str
    setting: str
    function: RewardFunction | None
    takes_group: bool = False


@dataclass(frozen=True)
class RewardPlan:
    """The weighted sum of reward sources.

    Attributes:
        sources: rules, functions and services.
        is_sum: whether `reward.components` is set; scores are then logged by source.
        max_response_length: tokens.
    """

    sources: tuple[SourceSpec, ...]
    models: tuple[SourceSpec, ...]
    is_sum: bool
    config: RewardConfig
    max_response_length: int

    @property
    def takes_groups(self) -> bool:
        """Whether a source scores all responses to a prompt in one call."""
        return any(source.takes_group for source in self.sources)


def build_reward_plan(
    config: RewardConfig, max_response_length: int, functions: Mapping[str, RewardFunction | None] = {}
) -> RewardPlan:
    """Read the reward section and load its functions.

    Args:
        config: `components`, or else the first given of `function` and `rule`.
        functions: passed objects by target, used instead of loading it.

    Raises:
        UserError: a component is malformed, a function or URL is unusable, or a model is named twice.
    """
    if config.components:
        setting = "reward.components"
        weighted = [
            (*_parse_component(text, f"{setting}[{i}]"), f"{setting}[{i}]") for i, text in enumerate(config.components)
        ]
    else:
        leaf = next(leaf for leaf in ("function", "rule") if getattr(config, leaf) is not None)
        weighted = [(1.0, getattr(config, leaf), f"reward.{leaf}")]
    repeated = next((model for model in config.models if config.models.count(model) > 1), None)
    if repeated is not None:
        raise UserError(
            f'the source "{repeated}" is given {config.models.count(repeated)} times',
            source="reward.components",
            expected="each reward model at most once",
            hint="add up the weights, or name another model of reward_model.further as 'model:NAME'",
        )
    sources: dict[str, SourceSpec] = {}
    for weight, target, setting in weighted:
        name = target if target in RULES else "service" if is_service(target) else target.rpartition(":")[2]
        names = chain([name], (f"{name}_{number}" for number in count(2)))
        taken = {*_RESERVED, *sources} - {target if target == REWARD_MODEL else ""}
        name = next(unique for unique in names if unique not in taken)
        loaded = functions.get(target)
        if loaded is None and target not in config.models:
            if target in RULES:
                loaded = Rule(target, config.answer)
            elif is_service(target):
                from megatron_rl.rewards.service import check_url

                check_url(target, setting)
            else:
                from megatron_rl.rewards.functions import load_reward_function

                loaded = load_reward_function(target, setting)
        takes_group = False
        if loaded is not None and not isinstance(loaded, Rule):
            from megatron_rl.rewards.calls import takes_group as find_group

            takes_group = find_group(loaded)
        sources[name] = SourceSpec(name, weight, target, setting, loaded, takes_group)
    models = tuple(source for source in sources.values() if source.target in config.models)
    local = tuple(source for source in sources.values() if source not in models)
    return RewardPlan(local, models, bool(config.components), config, max_response_length)


def compute_reward(plan: RewardPlan, scores: Sequence[Score], rollout: Rollout) -> tuple[float, dict[str, float]]:
    """Return a response's reward without the reward model, and the components to log.

    An environment's reward (not NaN) replaces the sum of the sources, and its components with a taken name become
    "environment/name". If `plan.is_sum`, a source's score is logged as "source" and its components as
    "source/component"; else components keep their names unless another metric has them.

    Raises:
        UserError: the sum is not finite or too large.
    """
    is_given, buffer = not math.isnan(rollout.reward), plan.config.overlong_buffer_length
    reward, components = rollout.reward if is_given else 0.0, {}
    for source, score in zip(() if is_given else plan.sources, scores, strict=True):
        reward += source.weight * score.value
        if plan.is_sum:
            components[source.name] = score.value
        for name, value in score.components.items():
            is_bare = name in _COUNTED or not (plan.is_sum or name in _RESERVED)
            key = name if is_bare else f"{source.name}/{name}"
            components[key] = components.get(key, 0.0) + value
    if buffer:
        # DAPO, arXiv 2503.14476, equation 13
        excess = len(rollout.response_tokens) - (plan.max_response_length - buffer)
        share = min(max(excess / buffer, 0.0), 1.0)
        components[OVERLONG] = -plan.config.overlong_penalty * share or 0.0  # not -0.0
        reward += components[OVERLONG]
    if not abs(reward) <= LARGEST:
        source = "the environment (agents.environment or agents.program)" if is_given else "reward"
        raise refuse_reward(reward, describe_rollout(rollout), source)
    taken = {*_RESERVED, *components}
    given = rollout.reward_components.items()
    return reward, {f"environment/{name}" if name in taken else name: value for name, value in given} | components


def refuse_reward(reward: float, what: str, source: str = "reward") -> UserError:
    """Return the error of a reward that is not finite or too large."""
    return UserError(
        f"the reward is {reward:g}\n{what}",
        source=source,
        expected=f"at most {LARGEST:g} in size, so that sums over a batch are finite",
        hint="scale the scores of the reward sources",
    )


def is_service(target: str) -> bool:
    """Return whether a source is an HTTP service."""
    return target.startswith(("http://", "https://"))


def _parse_component(text: str, setting: str) -> tuple[float, str]:
    weight, _, target = text.strip().partition(" ")
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not target.strip():
        raise UserError(
            f'"{text}" is not a weight and a source',
            source=setting,
            expected="WEIGHT SOURCE",
            hint="write e.g. '1.0 math', '0.1 my_reward.py:brevity', '0.5 model' or '0.3 model:NAME'",
        )
    return value, target.strip()


def check_truths(plan: RewardPlan, prompts: Sequence[Prompt]) -> list[str]:
    """Return notes on ground truths that can be compared as text only.

    Raises:
        UserError: a data set has no scorer in the rule by_data_source, a ground truth is not text for a rule that
            needs it, or a function takes a column that no row has.
    """
    targets = {source.target: source.setting for source in plan.sources}
    for source in plan.sources:
        if source.function is not None and not isinstance(source.function, Rule):
            from megatron_rl.rewards.calls import check_columns

            check_columns(source.function, prompts, source.setting)
    if "by_data_source" in targets:
        from megatron_rl.rewards.public_sets import find_scorer

        for data_source in sorted({prompt.data_source for prompt in prompts}):
            find_scorer(data_source)
    for rule, prompt in product([rule for rule in ("math", "exact") if rule in targets], prompts):
        if not all(isinstance(truth, str) for truth in list_truths(prompt.ground_truth)):
            raise UserError(
                f"the rule {rule} cannot compare with the ground truth {shorten(repr(prompt.ground_truth))} of "
                f'prompt_id {prompt.prompt_id}, data_source "{prompt.data_source}"',
                source=targets[rule],
                expected="a text, or a list of texts of which any is right",
                hint="use reward.function, which gets the ground truth unchanged",
            )
    if "math" not in targets:
        return []
    from megatron_rl.rewards.mathematics import is_readable

    unread = [
        (prompt, truth)
        for prompt in prompts
        for truth in list_truths(prompt.ground_truth)
        if not is_readable(extract_answer(truth) or truth.strip())
    ]
    if not unread:
        return []
    prompt, truth = unread[0]
    return [
        f"ground truths: {len(unread)} cannot be read as mathematics and are compared as text, the first: "
        f"prompt_id {prompt.prompt_id}, {shorten(repr(truth))}"
    ]
