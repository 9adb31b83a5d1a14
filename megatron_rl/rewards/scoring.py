# SPDX-License-Identifier: Apache-2.0
"""One response and one reward function: what the function is told, and what counts as a score.

The user's code fails in every way that code can fail; each is reported with the rollout that caused it
and the line that raised it. Invariant: every `Score` is finite.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.extension.user_code import ProcessExit, locate, refuse_exit
from megatron_rl.rewards.functions import RewardFunction, file_of, find_further_arguments
from megatron_rl.types import Rollout, UserError

_LONGEST_RESPONSE = 200


@dataclass(frozen=True)
class Sample:
    """What a reward source is told about one rollout; travels to worker processes and, in part, to services.

    Attributes:
        row: the columns of the data file, the prompt's excepted.
        response_tokens: [s] int32.
        finish_reason: "stop" or "length".
        step: of the main loop; 0 in validation.
    """

    prompt_id: int
    sample_index: int
    data_source: str
    prompt: str
    response: str
    ground_truth: Any
    extra_info: dict[str, Any]
    row: dict[str, Any] = field(default_factory=dict)
    response_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    finish_reason: str = "stop"
    step: int = 0

    @classmethod
    def of(cls, rollout: Rollout, step: int = 0) -> Sample:
        """The sample of a rollout whose response is decoded."""
        prompt = rollout.prompt
        return cls(prompt.prompt_id, rollout.sample_index, prompt.data_source, prompt.text, rollout.response,
                   prompt.ground_truth, dict(prompt.extra_info), prompt.row, rollout.response_tokens,
                   rollout.finish_reason, step)

    def describe(self) -> str:
        """Three lines for an error message; long texts are cut in the middle."""
        return (f'  rollout:  prompt_id {self.prompt_id}, sample_index {self.sample_index}, '
                f'data_source "{self.data_source}"\n'
                f"  response: {shorten(repr(self.response))}\n"
                f"  ground truth: {shorten(repr(self.ground_truth))}")


@dataclass(frozen=True)
class Score:
    """What one source says about one response: the score, and its components by name."""

    value: float
    components: dict[str, float] = field(default_factory=dict)


def compute_score(function: RewardFunction, sample: Sample) -> Score:
    """Call a reward function on one sample.

    Raises:
        UserError: the function raised, or returned something that is not a finite score.
    """
    further = {name: getattr(sample, name) for name in find_further_arguments(function)}
    if "response_tokens" in further:
        further["response_tokens"] = sample.response_tokens.tolist()
    if "row" in further:
        further["row"] = dict(sample.row)
    try:
        with refuse_exit():
            result = function(data_source=sample.data_source, solution_str=sample.response,
                              ground_truth=sample.ground_truth, extra_info=dict(sample.extra_info), **further)
    except (Exception, SystemExit, ProcessExit) as error:
        place = locate(error, file_of(function))
        raise _failure(f"raised {type(error).__name__}: {error}", sample, place) from error
    try:
        return parse_score(result)
    except ValueError as error:
        raise _failure(f"returned {error}", sample, file_of(function)) from error


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
        {str(name): _number(value, str(name)) for name, value in result.items()
         if name != "score" and _scalar(value) is not None})


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


def _failure(what: str, sample: Sample, place: str) -> UserError:
    return UserError(
        f"the reward function {what}\n{sample.describe()}", source=place,
        expected="a finite number, or a dict with a finite \"score\"",
        hint="make the function accept every text that a policy can write")
