# SPDX-License-Identifier: Apache-2.0
"""Calls a reward function on one response and validates its score.

Errors name the rollout and the line that raised. Invariant: every `Score` is finite.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.extension.user_code import ProcessExit, locate, refuse_exit
from megatron_rl.rewards.functions import RewardFunction, file_of, find_further_arguments
from megatron_rl.types import Rollout, UserError, text_of

LARGEST = 1e18  # limit of a reward: its square, in a group's variance, is finite in float32
_LONGEST_RESPONSE, _LONGEST_NAME = 200, 100
_NO_NAMES = ("reward", "std")  # would read as metrics of the run


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
    """One source's score of a response; `failure` is set if it is a fallback."""

    value: float
    components: dict[str, float] = field(default_factory=dict)
    failure: str = ""


def compute_score(function: RewardFunction, rollout: Rollout, step: int = 0) -> Score:
    """Call a reward function on a decoded rollout (step 0: validation).

    Raises:
        UserError: the function raised, or returned no finite score.
    """
    prompt = rollout.prompt
    tellable: dict[str, Callable[[], Any]] = {
        "prompt": lambda: prompt.text,
        "response_tokens": lambda: rollout.response_tokens.tolist(),
        "finish_reason": lambda: rollout.finish_reason,
        "step": lambda: step,
        "row": lambda: dict(prompt.row),
    }
    further = {name: tellable[name]() for name in find_further_arguments(function)}
    try:
        with refuse_exit():
            result = function(
                data_source=prompt.data_source,
                solution_str=rollout.response,
                ground_truth=prompt.ground_truth,
                extra_info=dict(prompt.extra_info),
                **further,
            )
    except (Exception, SystemExit, ProcessExit) as error:
        place = locate(error, file_of(function))
        raise _failure(f"raised {type(error).__name__}: {text_of(error)}", rollout, place) from error
    try:
        return parse_score(result)
    except ValueError as error:
        raise _failure(f"returned {error}", rollout, file_of(function)) from error


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
    """Cut the middle: a response gives its answer at the end."""
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


def _failure(what: str, rollout: Rollout, place: str) -> UserError:
    return UserError(
        f"the reward function {what}\n{describe_rollout(rollout)}",
        source=place,
        expected='a finite number, or a dict with a finite "score"',
        hint="make the function accept every text that a policy can write",
    )
