# SPDX-License-Identifier: Apache-2.0
"""From a config to a reward function, and from a list of rollouts to rewards.

A reward function has verl's signature: (data_source, solution_str, ground_truth, extra_info), called by
keyword, and returns a number, or a dict with "score" whose other numbers are logged one by one.
It is either a rule of this room or the user's own code, which is therefore checked when it is loaded,
and whose failures are reported with the rollout that caused them and the line that raised them.

Invariants: `score_rollouts` touches only the rollouts it is given (this rank's share) and communicates
with nobody; every rollout it returns from has a finite reward.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards.rules import exact_match, math_equal
from megatron_rl.types import Rollout, UserError

_RULES = {"exact": exact_match, "math": math_equal}
_SOURCE = "reward.function"
_SIGNATURE = "def name(data_source, solution_str, ground_truth, extra_info) -> float | dict"
_LONGEST_RESPONSE = 200


class RewardFunction(Protocol):
    """Scores one response."""

    def __call__(self, data_source: str, solution_str: str, ground_truth: str,
                 extra_info: dict[str, Any]) -> float | dict[str, Any]:
        """The score, or {"score": number, component: number, ...}."""
        ...


def build_reward_function(cfg: RewardConfig) -> RewardFunction:
    """The user's function where `cfg.function` names one, else the rule.

    Args:
        cfg: `function` is "path.py:name", the path relative to the working directory.

    Raises:
        UserError: the file or the name is missing, the file cannot be imported, or the object cannot be
            called with verl's four arguments.
    """
    if cfg.function is None:
        return _as_reward_function(_RULES[cfg.rule])
    path, separator, name = cfg.function.rpartition(":")
    if not separator or not path or not name:
        raise UserError(f'"{cfg.function}" names no function', source=_SOURCE, expected="path.py:name",
                        hint="write the file and the function, e.g. rewards/my_reward.py:compute_score")
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{file} does not exist or is not a file", source=_SOURCE, expected="path.py:name",
                        hint=f"check the path; it is relative to {Path.cwd()}")
    return _check_function(getattr(_import_file(file), name, None), name, file)


def score_rollouts(rollouts: list[Rollout], function: RewardFunction,
                   decode: Callable[[Sequence[int]], str] | None = None) -> None:
    """Fill `reward` and `reward_components` of each rollout in place.

    Args:
        rollouts: this rank's share.
        function: from `build_reward_function`.
        decode: makes `response` from `response_tokens` first; default: `response` is there already.

    Raises:
        UserError: the function failed on a rollout or returned something that is not a finite score.
    """
    for rollout in rollouts:
        if decode is not None:
            rollout.response = decode(rollout.response_tokens.tolist())
        rollout.reward, rollout.reward_components = _score(rollout, function)


def _as_reward_function(rule: Callable[[str, str], float]) -> RewardFunction:
    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return rule(solution_str, ground_truth)

    return score


def _import_file(file: Path) -> ModuleType:
    resolved = file.resolve()
    name = f"reward_function_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} is not a Python file", source=_SOURCE, expected="path.py:name", hint="name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        place = f"{file}:{error.lineno}" if isinstance(error, SyntaxError) else _place(error, str(resolved))
        raise UserError(f"importing the file raised {type(error).__name__}: {error}", source=f"{_SOURCE}, {place}",
                        expected="a file that can be imported", hint=f"try: python {file}") from error
    return module


def _check_function(function: Any, name: str, file: Path) -> RewardFunction:
    source = f"{_SOURCE} = {file}:{name}"
    if function is None:
        raise UserError(f'{file} defines no "{name}"', source=source, expected=_SIGNATURE, hint="check the name")
    if not callable(function):
        raise UserError(f'"{name}" is a {type(function).__name__} and cannot be called', source=source,
                        expected=_SIGNATURE, hint="name a function")
    if inspect.iscoroutinefunction(function):
        raise UserError(f'"{name}" is an async function', source=source, expected=_SIGNATURE,
                        hint="write a plain function that waits inside")
    try:
        signature = inspect.signature(function)
        signature.bind(data_source="", solution_str="", ground_truth="", extra_info={})
    except (TypeError, ValueError) as error:
        raise UserError(f'"{name}" does not accept the four arguments by name: {error}', source=source,
                        expected=_SIGNATURE, hint="rename the parameters; further ones need defaults") from error
    return function


def _score(rollout: Rollout, function: RewardFunction) -> tuple[float, dict[str, float]]:
    prompt = rollout.prompt
    try:
        result = function(data_source=prompt.data_source, solution_str=rollout.response,
                          ground_truth=prompt.ground_truth, extra_info=dict(prompt.extra_info))
    except Exception as error:
        place = _place(error, _file_of(function))
        raise _failure(f"raised {type(error).__name__}: {error}", rollout, place) from error
    if not isinstance(result, dict):
        return _number(result, "the score", rollout, function), {}
    if "score" not in result:
        names = ", ".join(map(str, result)) or "nothing"
        raise _failure(f'returned a dict without "score" (it has {names})', rollout, _file_of(function))
    score = _number(result["score"], "score", rollout, function)
    components = {str(name): _number(value, str(name), rollout, function) for name, value in result.items()
                  if name != "score" and _scalar(value) is not None}
    return score, components


def _number(value: Any, name: str, rollout: Rollout, function: RewardFunction) -> float:
    number = _scalar(value)
    if number is None or not math.isfinite(number):
        shown = _shorten(repr(value))
        raise _failure(f"returned {shown} ({type(value).__name__}) as {name}", rollout, _file_of(function))
    return number


def _scalar(value: Any) -> float | None:
    """A Python, numpy or torch number (a bool counts) as float; None for anything else."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, bool | int | float | np.bool_):
        return None
    return float(value) if abs(value) <= sys.float_info.max else math.inf


def _failure(what: str, rollout: Rollout, place: str) -> UserError:
    prompt = rollout.prompt
    return UserError(
        f"the reward function {what}\n"
        f"  rollout:  prompt_id {prompt.prompt_id}, sample_index {rollout.sample_index}, "
        f'data_source "{prompt.data_source}"\n'
        f"  response: {_shorten(repr(rollout.response))}\n"
        f"  ground truth: {_shorten(repr(prompt.ground_truth))}",
        source=place, expected="a finite number, or a dict with a finite \"score\"",
        hint="make the function accept every text that a policy can write")


def _file_of(function: Any) -> str:
    """The file that defines a function, or the class of a callable object."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code.co_filename if code is not None else repr(function)


def _place(error: BaseException, file: str) -> str:
    """file:line of the deepest frame inside the user's file, else of where the error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == file] or frames
    return f"{inside[-1].filename}:{inside[-1].lineno}"


def _shorten(text: str) -> str:
    """Beginning and end: a response names its answer at the end."""
    if len(text) <= _LONGEST_RESPONSE:
        return text
    half = _LONGEST_RESPONSE // 2
    return f"{text[:half]} ... {text[-half:]} ({len(text)} characters)"
