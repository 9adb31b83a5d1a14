# SPDX-License-Identifier: Apache-2.0
"""Loading and checking of reward functions: built-in rules, or the user's code.

A reward function has verl's signature (data_source, solution_str, ground_truth, extra_info), is called by keyword, and
returns a number, or a dict with "score" and further numbers to log. It also receives the `FURTHER_ARGUMENTS` that it
takes.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Protocol, cast

from megatron_rl.extension.user_code import import_file
from megatron_rl.rewards.rules import RULES, AnswerPolicy
from megatron_rl.types import UserError

_SIGNATURE = "def name(data_source, solution_str, ground_truth, extra_info) -> float | dict"
FURTHER_ARGUMENTS = ("prompt", "response_tokens", "finish_reason", "step", "row")


class RewardFunction(Protocol):
    """A function that scores one response."""

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **further: Any
    ) -> float | dict[str, Any]:
        """Return the score, or {"score": number, component: number, ...}."""
        ...


def load_reward_function(
    name: str, setting: str = "reward.function", answer: AnswerPolicy = "marked"
) -> RewardFunction:
    """Load a built-in rule of `RULES` by name, or a user's function "path.py:name", relative to the working directory.

    Args:
        setting: config setting that holds the name, for errors.
        answer: for the rule "math": "marked" accepts only a marked answer, "any" also the last expression.

    Raises:
        UserError: the file or name is missing, the import fails, or the signature is wrong.
    """
    if name in RULES:
        return cast(
            RewardFunction,
            lambda data_source, solution_str, ground_truth, extra_info: RULES[name](
                solution_str, ground_truth, data_source, answer
            ),
        )
    path, separator, attribute = name.rpartition(":")
    if not separator or not path or not attribute:
        raise UserError(
            f'"{name}" names no function',
            source=setting,
            expected=f"path.py:name, or one of the rules {', '.join(RULES)}",
            hint="write the file and the function, e.g. rewards/my_reward.py:compute_score",
        )
    module = import_file(path, setting, "path.py:name")
    return check_reward_function(getattr(module, attribute, None), attribute, f"{setting} = {name}")


def check_reward_function(function: Any, name: str, source: str) -> RewardFunction:
    """Return the object if it is a valid reward function (UserError otherwise)."""
    if function is None:
        raise UserError(f'the file defines no "{name}"', source=source, expected=_SIGNATURE, hint="check the name")
    if not callable(function):
        raise UserError(
            f'"{name}" is a {type(function).__name__} and cannot be called',
            source=source,
            expected=_SIGNATURE,
            hint="name a function",
        )
    if inspect.iscoroutinefunction(function):
        raise UserError(
            f'"{name}" is an async function',
            source=source,
            expected=_SIGNATURE,
            hint="write a plain function that waits inside",
        )
    found = cast(RewardFunction, function)
    try:
        signature = inspect.signature(found)
        signature.bind(
            data_source="",
            solution_str="",
            ground_truth="",
            extra_info={},
            **dict.fromkeys(find_further_arguments(found)),
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f'"{name}" does not accept the four arguments by name: {error}',
            source=source,
            expected=_SIGNATURE,
            hint="rename the parameters; further ones need defaults",
        ) from error
    return found


def find_further_arguments(function: RewardFunction) -> list[str]:
    """Return the `FURTHER_ARGUMENTS` that a function takes."""
    return (_remember_further_arguments if inspect.isfunction(function) else _read_further_arguments)(function)


def _read_further_arguments(function: RewardFunction) -> list[str]:
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in FURTHER_ARGUMENTS if takes_all or name in parameters]


_remember_further_arguments = cache(_read_further_arguments)  # reading a signature is as slow as a rule


def file_of(function: Any) -> str:
    """Return the file that defines a function, or a callable object's class."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code.co_filename if code is not None else repr(function)
