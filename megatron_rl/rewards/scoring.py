# SPDX-License-Identifier: Apache-2.0
"""Scores: the built-in reward rules, the weighted sum of reward sources, and the scoring of one rank's rollouts.

    reward = sum_i weight_i * score_i  + sum_m weight_m * score_m of reward models  + soft overlong punishment

    generator.generate(..., on_finished=scorer.begin)         # workers and services start at once
    scored = scorer.finish(rollouts of this rank)             # waits

`plan.py` reads the sum from the config and opens its sources; `functions.py` has the user's functions. Reward models
score elsewhere and collectively: `add_model_scores` of `training/roles` follows `compute_reward`. Scores do not depend
on whether or when `begin` was called.

Invariant: every `Score` is finite. Rules never raise on a response, and unreadable answers are wrong: `exact_match`
compares texts, `score_math` meanings, `marks_answer` only the form.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_rl.config.schema import REWARD_MODEL, RewardConfig
from megatron_rl.rewards.answers import RESTATES, extract_answer, restates_prompt
from megatron_rl.types import SERVICE_FAILURES, Rollout, UserError, text_of

if TYPE_CHECKING:
    from megatron_rl.rewards.terms import Term

LARGEST = 1e18  # limit of a reward: its square, in a group's variance, is finite in float32
_LONGEST_RESPONSE, _LONGEST_NAME = 200, 100
_NO_NAMES = ("reward", "std")  # would read as metrics of the run

# Called with verl's four arguments and further ones by name; `parse_score` checks what it returns.
RewardFunction = Callable[..., object]


def describe_rollout(rollout: Rollout) -> str:
    """Describe a rollout in three lines for an error message."""
    prompt = rollout.prompt
    return (
        f"  rollout:  prompt_id {prompt.prompt_id}, sample_index {rollout.sample_index}, "
        f'data_source "{prompt.data_source}"\n'
        f"  response: {shorten(repr(rollout.response))}\n"
        f"  ground truth: {shorten(repr(prompt.ground_truth))}"
    )


@dataclass(frozen=True)
class Score:
    """One source's score of a response; `failure`: error of the source, if the score is a fallback."""

    value: float
    components: dict[str, float] = field(default_factory=dict)
    failure: str = ""


def parse_score(result: Any) -> Score:
    """Parse a number, or {"score": number, component: number, ...}; non-numeric components are dropped.

    Raises:
        ValueError: there is no score, or a number is not finite.
    """
    if not isinstance(result, dict):
        return Score(_number(result, "the score"))
    if "score" not in result:
        names = ", ".join(map(str, result)) or "nothing"
        raise ValueError(f'a dict without "score" (it has {names})')
    return Score(
        _number(result["score"], "score"),
        {
            check_name(str(name)): _number(value, str(name))
            for name, value in result.items()
            if name != "score" and _scalar(value) is not None
        },
    )


def check_name(name: Any) -> str:
    """Return a component's name if it is a valid metric name (ValueError otherwise)."""
    is_right = isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and name.isprintable() and "/" not in name
    if not is_right or name in _NO_NAMES:
        raise ValueError(
            f"a component named {shorten(repr(name))}; a name has 1 to {_LONGEST_NAME} printable characters without a "
            f"slash, and is not {', '.join(_NO_NAMES)}"
        )
    return name


def shorten(text: str) -> str:
    """Cut a long text in its middle, since a response gives its answer at the end."""
    if len(text) <= _LONGEST_RESPONSE:
        return text
    half = _LONGEST_RESPONSE // 2
    return f"{text[:half]} ... {text[-half:]} ({len(text)} characters)"


def _number(value: Any, name: str) -> float:
    number = _scalar(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"{shorten(repr(value))} ({type(value).__name__}) as {name}")
    return number


def _scalar(value: Any) -> float | None:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, bool | int | float | np.bool_):
        return None
    return float(value) if abs(value) <= sys.float_info.max else math.inf


def parse_returned(result: Any, rollout: Rollout, place: str) -> Score:
    """Parse what the reward function at `place` returned for a rollout (UserError if there is no finite score)."""
    try:
        return parse_score(result)
    except ValueError as error:
        raise refuse_score(f"returned {error}", rollout, place) from error


def refuse_score(what: str, rollout: Rollout, place: str) -> UserError:
    """Return the error of a reward function, at `place`, that has no score for a rollout."""
    return UserError(
        f"the reward function {what}\n{describe_rollout(rollout)}",
        source=place,
        expected='a finite number per response, or a dict with a finite "score"',
        hint="make the function return that for every text that a policy can write",
    )


UNMARKED, TIMEOUTS, UNPARSABLE_TRUTH = "unmarked_answers", "math_timeouts", "math_unparsable_truth"
# Counts of failures in `score_math`; their names have no source prefix in a sum.
COUNTS = (UNMARKED, TIMEOUTS, UNPARSABLE_TRUTH)


def exact_match(response: str, ground_truth: Any) -> float:
    """Return 1.0 if the response equals any ground truth, ignoring surrounding whitespace, else 0.0."""
    return float(any(response.strip() == truth.strip() for truth in list_truths(ground_truth)))


def score_math(
    response: str, ground_truth: Any, data_source: str = "", answer: Literal["marked", "any"] = "marked"
) -> dict[str, float]:
    """Score 1.0 if the response's answer equals a ground truth mathematically, else 0.0.

    Args:
        ground_truth: an answer, a solution that marks it, or a list of alternatives.
        answer: "marked" accepts only a marked answer; "any" falls back to the last expression.

    Returns:
        "score", and 1.0 or 0.0 per name in `COUNTS`: no answer marked; timeout; compared as text only.
    """
    from megatron_rl.rewards.mathematics import compare_answers

    found = extract_answer(response, data_source)
    counts = dict.fromkeys(COUNTS, 0.0) | {UNMARKED: float(found is None)}
    if found is None and answer == "marked":
        return {"score": 0.0, **counts}
    text = response.strip() if found is None else found
    verdicts = [
        compare_answers(text, extract_answer(truth) or truth.strip(), is_named=found is not None)
        for truth in list_truths(ground_truth)
    ]
    return {
        "score": float("equal" in verdicts),
        **counts,
        TIMEOUTS: float("timeout" in verdicts),
        UNPARSABLE_TRUTH: float("unparsable truth" in verdicts),
    }


def marks_answer(response: str, ground_truth: Any = "", data_source: str = "") -> float:
    r"""Return 1.0 if the response marks an answer, right or wrong, by a closed \boxed{} or a "####", else 0.0."""
    return float(bool(extract_answer(response, data_source)))


def _score_as_verl(response: str, ground_truth: Any, data_source: str) -> float | dict[str, float]:
    from megatron_rl.rewards.public_sets import find_scorer

    return find_scorer(data_source)(response, ground_truth)


# Names of `REWARD_RULES` -> rule(response, ground_truth, data_source).
RULES: dict[str, Callable[[str, Any, str], float | dict[str, float]]] = {
    "math": score_math,
    "math_any": partial(score_math, answer="any"),
    "exact": lambda response, truth, source: exact_match(response, truth),
    "format": marks_answer,
    "by_data_source": _score_as_verl,
}


@dataclass(frozen=True)
class Rule:
    """A built-in rule as a reward function."""

    name: str  # in `RULES`

    def __call__(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> object:
        """Return the rule's score, a number or a dict; `extra_info` is ignored."""
        return RULES[self.name](solution_str, ground_truth, data_source)

    def begin(self, rollout: Rollout, step: int) -> Callable[[], Score]:
        """Return a function that scores a rollout, as a source of the scorer."""
        return partial(score_by_rule, self, rollout)


def score_by_rule(rule: Rule, rollout: Rollout) -> Score:
    """Score a decoded rollout.

    Raises:
        UserError: the rule raised, or returned no finite score.
    """
    prompt = rollout.prompt
    if prompt.ground_truth is None:  # of a text for `policy.sample`
        return Score(0.0, failure=f"the rule {rule.name} has no ground truth to compare with")
    try:
        result = rule(prompt.data_source, rollout.response, prompt.ground_truth)
    except Exception as error:  # a ground truth of another form than the rule's
        from megatron_rl.extension.user_code import locate

        found = f"raised {type(error).__name__}: {text_of(error)}"
        raise refuse_score(found, rollout, locate(error, __file__)) from error
    return parse_returned(result, rollout, __file__)


def list_truths(ground_truth: Any) -> list[Any]:
    """Return the alternative ground truths as a list."""
    return ground_truth if isinstance(ground_truth, list) else [ground_truth]


OVERLONG = "overlong"
# Counts of failures; their names have no source prefix in a sum.
_COUNTED = (SERVICE_FAILURES, *COUNTS)
# Names of other metrics reward/<name>.
RESERVED = (REWARD_MODEL, OVERLONG, RESTATES, *_COUNTED, "mean", "uninformative_groups")


@dataclass(frozen=True)
class SourceSpec:
    """One reward source."""

    name: str  # of its component in the logs
    weight: float  # without a `term`
    target: str  # a rule, "path.py:name", a service URL, or a reward model, "model" or "model:NAME"
    setting: str  # config setting that names the target, for errors
    function: RewardFunction | None  # `None` for a service or model
    takes_group: bool = False  # see `calls.takes_group`
    term: Term | None = None  # schedule and thresholds, if there are any

    def weigh(self, score: Any, scores: Mapping[str, Any], step: Any) -> tuple[Any, Any]:
        """Return a score after its thresholds, and its weight at a step; numbers, or arrays of responses."""
        return (score, self.weight) if self.term is None else (self.term.count(score, scores), self.term.weigh(step))


@dataclass(frozen=True)
class RewardPlan:
    """The weighted sum of reward sources."""

    sources: tuple[SourceSpec, ...]  # rules, functions and services
    models: tuple[SourceSpec, ...]
    is_sum: bool  # whether `reward.components` is set; scores are then logged by source
    config: RewardConfig
    max_response_length: int  # tokens

    @property
    def takes_groups(self) -> bool:
        """Whether a source scores all responses to a prompt in one call."""
        return any(source.takes_group for source in self.sources)

    def weights_at(self, step: int) -> dict[str, float]:
        """Return the weight of each source in a step, by the name of its component."""
        sources = (*self.sources, *self.models)
        return {one.name: one.weight if one.term is None else float(one.term.weigh(step)) for one in sources}

    def describe_weights(self, step: int) -> dict[str, float]:
        """Return `reward/weight/<source>` of the sources whose weight follows a schedule."""
        scheduled = {one.name for one in (*self.sources, *self.models) if one.term and len(one.term.steps) > 1}
        return {f"reward/weight/{name}": weight for name, weight in self.weights_at(step).items() if name in scheduled}


def compute_reward(
    plan: RewardPlan, scores: Sequence[Score], rollout: Rollout, step: int = 0
) -> tuple[float, dict[str, float]]:
    """Return a response's reward at a step without the reward model, and the components to log.

    An environment's reward (not NaN) replaces the sum of the sources, and its components with a taken name become
    "environment/name". If `plan.is_sum`, a source's score after its thresholds is logged as "source", its components as
    "source/component"; else components keep their names unless another metric has them.

    Raises:
        UserError: the sum is not finite or too large.
    """
    is_given, buffer = not math.isnan(rollout.reward), plan.config.overlong_buffer_length
    reward, components = rollout.reward if is_given else 0.0, {}
    by_name = {source.name: score.value for source, score in zip(plan.sources, scores, strict=False)}
    for source, score in zip(() if is_given else plan.sources, scores, strict=True):
        value, weight = source.weigh(score.value, by_name, step)
        reward += weight * value
        if plan.is_sum:
            components[source.name] = float(value)
        for name, value in score.components.items():
            is_bare = name in _COUNTED or not (plan.is_sum or name in RESERVED)
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
    taken = {*RESERVED, *components}
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


# (decoded response, step) -> function that waits for the score (UserError if it failed). It must not raise itself: the
# rollout engine calls it.
RewardSource = Callable[[Rollout, int], Callable[[], Score]]


class Scorer:
    """The local reward sources of one rank, opened by `plan.open_scorer`; no communication with other ranks.

    Args:
        decode: response tokens -> text.
        notice_children: context in which processes that functions leave behind are noticed.

    Attributes:
        close: ends workers, requests, and processes left behind by reward functions.
        is_concurrent: whether scoring starts before `finish`.
        takes_groups: whether a source scores all responses to a prompt in one call.
    """

    def __init__(
        self,
        plan: RewardPlan,
        sources: Sequence[RewardSource],
        decode: Callable[[Sequence[int]], str],
        *,
        is_concurrent: bool,
        notice_children: Callable[[], AbstractContextManager],
        close: Callable[[], None],
    ) -> None:
        self._plan, self._sources, self._decode, self._notice_children = plan, sources, decode, notice_children
        self.is_concurrent, self.takes_groups, self.close = is_concurrent, plan.takes_groups, close
        self._begun: dict[int, tuple[Rollout, Rollout, list[Any], int]] = {}

    def begin(self, rollout: Rollout, step: int = 0) -> None:
        """Decode the last turn and start scoring it (step 0: validation); `finish` must get the same object.

        A rollout with an environment's reward is only decoded.
        """
        decoded = replace(rollout, response=self._decode(rollout.answer_tokens.tolist()))
        sources = zip(self._plan.sources, self._sources, strict=True) if math.isnan(rollout.reward) else ()
        waits = [partial(begin, decoded, step) if spec.takes_group else begin(decoded, step) for spec, begin in sources]
        self._begun[id(rollout)] = rollout, decoded, waits, step  # an id is unique only while its object exists

    def finish(
        self,
        rollouts: Sequence[Rollout],
        step: int | Sequence[int] = 0,
        count: Callable[[], None] = lambda: None,
    ) -> list[Rollout]:
        """Return this rank's rollouts with response and reward, without the reward model's part.

        The component `RESTATES` is 1.0 if an answer that restates the prompt got a positive reward.

        Args:
            step: one for all or one per rollout; for rollouts that `begin` has not received.
            count: called after each rollout.

        Raises:
            UserError: a source failed on a rollout or a sum is not finite; the first in order.
        """
        for rollout, its_step in zip(rollouts, np.broadcast_to(step, len(rollouts)).tolist(), strict=True):
            if id(rollout) not in self._begun:
                self.begin(rollout, its_step)
        scored, begun = [], [self._begun.pop(id(rollout)) for rollout in rollouts]
        with self._notice_children():
            for _, _, waits, _ in begun if self.takes_groups else ():  # groups begin in the order of their samples
                waits[:] = [wait() if spec.takes_group else wait for spec, wait in zip(self._plan.sources, waits)]
            for _, decoded, waits, begun_at in begun:
                scores = [wait() for wait in waits]
                failure = next((score.failure for score in scores if score.failure), decoded.failure)
                reward, components = compute_reward(self._plan, scores, decoded, begun_at)
                prompt, truths = decoded.prompt, list_truths(decoded.prompt.ground_truth)
                are_texts = reward > 0 and all(isinstance(truth, str) for truth in truths)
                if are_texts and restates_prompt(decoded.response, prompt.text, truths, prompt.data_source):
                    components[RESTATES] = 1.0
                scored.append(replace(decoded, reward=reward, reward_components=components, failure=failure))
                count()
        return scored
