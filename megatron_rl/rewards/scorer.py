# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of reward sources, and its scores of one rank's rollouts, during generation if a source supports it.

    reward = sum_i weight_i * score_i  + sum_m weight_m * score_m of reward models  + soft overlong punishment

    generator.generate(..., on_finished=scorer.begin)         # workers and services start at once
    scored = scorer.finish(rollouts of this rank)             # waits

Reward models score elsewhere and collectively: `add_model_scores` of `training/roles` follows `compute_reward`.
Invariant: scores do not depend on whether or when `begin` was called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, product

import numpy as np

from megatron_rl.config.schema import REWARD_MODEL, RewardConfig
from megatron_rl.rewards.answers import RESTATES, extract_answer, restates_prompt
from megatron_rl.rewards.scoring import (
    COUNTS,
    LARGEST,
    RULES,
    RewardFunction,
    Rule,
    Score,
    describe_rollout,
    list_truths,
    score_by_rule,
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


def check_truths(plan: RewardPlan, prompts: Sequence[Prompt], has_episodes: bool = False) -> list[str]:
    """Return notes on ground truths that can be compared as text only, not on an environment's blank ones.

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
        if (truth.strip() or not has_episodes) and not is_readable(extract_answer(truth) or truth.strip())
    ]
    if not unread:
        return []
    prompt, truth = unread[0]
    return [
        f"ground truths: {len(unread)} cannot be read as mathematics and are compared as text, the first: "
        f"prompt_id {prompt.prompt_id}, {shorten(repr(truth))}"
    ]


# (decoded response, step) -> function that waits for the score (UserError if it failed). It must not raise itself: the
# rollout engine calls it.
RewardSource = Callable[[Rollout, int], Callable[[], Score]]


class Scorer:
    """The local reward sources of one rank; no communication with other ranks.

    With reward.workers=0, rules and functions run during `finish`, and a function that hangs blocks the run until the
    collective timeout.

    Args:
        decode: response tokens -> text.

    Attributes:
        is_concurrent: whether scoring starts before `finish`.
        takes_groups: whether a source scores all responses to a prompt in one call.
    """

    def __init__(self, plan: RewardPlan, config: RewardConfig, decode: Callable[[Sequence[int]], str]) -> None:
        self._plan, self._decode = plan, decode
        self._sources: list[RewardSource] = []
        self._open = ExitStack()
        functions = [(spec.target, spec.setting) for spec in plan.sources if spec.function and not spec.takes_group]
        pool = None
        if config.workers and functions:
            from megatron_rl.rewards.functions import WorkerPool

            pool = WorkerPool(
                functions, config.workers, config.timeout_seconds, answer=config.answer, secrets=config.worker_secrets
            )
            self._open.callback(pool.close)
        here = [spec for spec in plan.sources if spec.function and (pool is None or spec.takes_group)]
        runs_code = any(not isinstance(spec.function, Rule) for spec in here)
        left = None
        if runs_code:
            from megatron_rl.rewards.functions import LeftBehind, compute_score, is_batched

            left = LeftBehind()
        self._notice_children: Callable[[], AbstractContextManager] = left.notice if left else nullcontext
        for spec in plan.sources:
            if spec.function is None:
                from megatron_rl.rewards.service import RewardService

                service = RewardService(spec.target, config, spec.setting)
                self._open.callback(service.close)
                self._sources.append(service.begin)
            elif spec not in here:
                assert pool is not None
                submit = partial(pool.submit, functions.index((spec.target, spec.setting)))
                self._sources.append(lambda *sample, submit=submit: submit(*sample).result)
            elif isinstance(spec.function, Rule):  # runs when its score is awaited
                self._sources.append(lambda rollout, step, rule=spec.function: partial(score_by_rule, rule, rollout))
            elif is_batched(spec.function):
                from megatron_rl.rewards.calls import BatchSource

                self._sources.append(BatchSource(spec.function).begin)
            else:  # likewise, and cannot be interrupted
                self._sources.append(lambda *sample, score=spec.function: partial(compute_score, score, *sample))
        if left:
            self._open.callback(left.kill)  # at the end, before requests in flight are waited for
        self.is_concurrent = any(spec.function is None or pool is not None for spec in plan.sources)
        self.takes_groups = plan.takes_groups
        self._begun: dict[int, tuple[Rollout, Rollout, list[Callable[[], Score]]]] = {}

    def begin(self, rollout: Rollout, step: int = 0) -> None:
        """Decode the last turn and start scoring it (step 0: validation); `finish` must get the same object.

        A rollout with an environment's reward is only decoded.
        """
        decoded = replace(rollout, response=self._decode(rollout.answer_tokens.tolist()))
        sources = self._sources if math.isnan(rollout.reward) else []
        waits = [begin(decoded, step) for begin in sources]
        self._begun[id(rollout)] = rollout, decoded, waits  # an id is unique only while its object exists

    def finish(self, rollouts: Sequence[Rollout], step: int | Sequence[int] = 0) -> list[Rollout]:
        """Return this rank's rollouts with response and reward, without the reward model's part.

        The component `RESTATES` is 1.0 if an answer that restates the prompt got a positive reward.

        Args:
            step: one for all or one per rollout; for rollouts that `begin` has not received.

        Raises:
            UserError: a source failed on a rollout or a sum is not finite; the first in order.
        """
        for rollout, its_step in zip(rollouts, np.broadcast_to(step, len(rollouts)).tolist(), strict=True):
            if id(rollout) not in self._begun:
                self.begin(rollout, its_step)
        scored = []
        with self._notice_children():
            for _, decoded, waits in (self._begun.pop(id(rollout)) for rollout in rollouts):
                scores = [wait() for wait in waits]
                failure = next((score.failure for score in scores if score.failure), decoded.failure)
                reward, components = compute_reward(self._plan, scores, decoded)
                prompt, truths = decoded.prompt, list_truths(decoded.prompt.ground_truth)
                are_texts = reward > 0 and all(isinstance(truth, str) for truth in truths)
                if are_texts and restates_prompt(decoded.response, prompt.text, truths, prompt.data_source):
                    components[RESTATES] = 1.0
                scored.append(replace(decoded, reward=reward, reward_components=components, failure=failure))
        return scored

    def close(self) -> None:
        """End workers, requests, and processes left behind by reward functions."""
        self._open.close()
