# SPDX-License-Identifier: Apache-2.0
"""One response and one reward function: what the function is told, and what counts as a score.

The user's code fails in every way that code can fail; each is reported with the rollout that caused it
and the line that raised it. Invariant: every `Score` is finite.
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

LARGEST = 1e18  # of a reward: its square, in the variance of a group, is finite in float32
_LONGEST_RESPONSE, _LONGEST_NAME = 200, 100
_NO_NAMES = ("reward", "std")  # they would read as quantities of the run


def describe_rollout(rollout: Rollout) -> str:
    """Three lines for an error message; long texts are cut in the middle."""
    prompt = rollout.prompt
    return (
        f"  rollout:  prompt_id {prompt.prompt_id}, sample_index {rollout.sample_index}, "
        f'data_source "{prompt.data_source}"\n'
        f"  response: {shorten(repr(rollout.response))}\n"
        f"  ground truth: {shorten(repr(prompt.ground_truth))}"
    )


@dataclass(frozen=True)
class Score:
    """The score of one response by one source, its components by name, and the failure that it stands for."""

    value: float
    components: dict[str, float] = field(default_factory=dict)
    failure: str = ""


def compute_score(function: RewardFunction, rollout: Rollout, step: int = 0) -> Score:
    """Call a reward function on one rollout whose response is decoded.

    Args:
        function: the user's, or a rule.
        rollout: to score.
        step: of the main loop; 0 in validation.

    Raises:
        UserError: the function raised, or returned something that is not a finite score.
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
    """Read a number, or {"score": number, component: number, ...}; components that are no numbers are left out.

    Raises:
        ValueError: it is neither, or some number in it is not finite; the message says what it is.
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
    """The name of a component, which becomes that of a metric.

    Raises:
        ValueError: it cannot.
    """
    is_right = isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and name.isprintable() and "/" not in name
    if not is_right or name in _NO_NAMES:
        raise ValueError(
            f"a component named {shorten(repr(name))}; a name has 1 to {_LONGEST_NAME} printable characters without a "
            f"slash, and is not {', '.join(_NO_NAMES)}"
        )
    return name


def shorten(text: str) -> str:
    """Beginning and end: a response names its answer at the end."""
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
    """A Python, numpy or torch number (a bool counts) as float; None for anything else."""
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
