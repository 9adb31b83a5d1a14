# SPDX-License-Identifier: Apache-2.0
"""Reward functions by name: a rule of this room, or the user's own code, checked when it is loaded.

A reward function has verl's signature: (data_source, solution_str, ground_truth, extra_info), called by
keyword, and returns a number, or a dict with "score" whose other numbers are logged one by one.

Invariant: a file is imported once per process, however many of its functions are used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from megatron_rl.rewards.rules import RULES
from megatron_rl.types import UserError

_SIGNATURE = "def name(data_source, solution_str, ground_truth, extra_info) -> float | dict"
# Modules by file and time of its last change.
_IMPORTED: dict[tuple[Path, int], ModuleType] = {}


class RewardFunction(Protocol):
    """Scores one response."""

    def __call__(self, data_source: str, solution_str: str, ground_truth: str,
                 extra_info: dict[str, Any]) -> float | dict[str, Any]:
        """The score, or {"score": number, component: number, ...}."""
        ...


def load_reward_function(name: str, setting: str = "reward.function") -> RewardFunction:
    """The rule or the user's function of that name.

    Args:
        name: a rule ("exact", "math", "format"), or "path.py:name" with the path relative to the working directory.
        setting: where the name was given, for errors.

    Raises:
        UserError: the file or the name is missing, the file cannot be imported, or the object cannot be
            called with verl's four arguments.
    """
    if name in RULES:
        return _as_reward_function(RULES[name])
    path, separator, attribute = name.rpartition(":")
    if not separator or not path or not attribute:
        raise UserError(f'"{name}" names no function', source=setting,
                        expected=f"path.py:name, or one of the rules {', '.join(RULES)}",
                        hint="write the file and the function, e.g. rewards/my_reward.py:compute_score")
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{file} does not exist or is not a file", source=setting, expected="path.py:name",
                        hint=f"check the path; it is relative to {Path.cwd()}")
    module = _import_file(file, setting)
    return check_reward_function(getattr(module, attribute, None), attribute, f"{setting} = {file}:{attribute}")


def _as_reward_function(rule: Callable[[str, str], float]) -> RewardFunction:
    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return rule(solution_str, ground_truth)

    return score


def _import_file(file: Path, setting: str) -> ModuleType:
    resolved = file.resolve()
    version = (resolved, resolved.stat().st_mtime_ns)
    if version in _IMPORTED:
        return _IMPORTED[version]
    name = f"reward_function_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} is not a Python file", source=setting, expected="path.py:name", hint="name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        place = f"{file}:{error.lineno}" if isinstance(error, SyntaxError) else locate(error, str(resolved))
        raise UserError(f"importing the file raised {type(error).__name__}: {error}", source=f"{setting}, {place}",
                        expected="a file that can be imported", hint=f"try: python {file}") from error
    _IMPORTED[version] = module
    return module


def check_reward_function(function: Any, name: str, source: str) -> RewardFunction:
    """The function, if it can be called as a reward function.

    Raises:
        UserError: it cannot.
    """
    if function is None:
        raise UserError(f'the file defines no "{name}"', source=source, expected=_SIGNATURE, hint="check the name")
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


def file_of(function: Any) -> str:
    """The file that defines a function, or the class of a callable object."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code.co_filename if code is not None else repr(function)


def locate(error: BaseException, file: str) -> str:
    """file:line of the deepest frame inside the user's file, else of where the error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == file] or frames
    return f"{inside[-1].filename}:{inside[-1].lineno}"
