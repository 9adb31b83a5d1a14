# SPDX-License-Identifier: Apache-2.0
"""The tool interface, and the environment that runs the tools called by replies."""

from __future__ import annotations

import inspect
import json
import time
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_rl.agents.environment import Done, Observation, Reply, Task, ToolCall

_LONGEST_RESULT = 8000  # characters
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}

Call = Callable[..., Any]


@dataclass(frozen=True)
class Tool:
    """A function that replies can call by name."""

    spec: dict[str, Any]  # for the chat template, in OpenAI format
    load: Callable[[], Call]  # returns the function; called once, before episodes start
    in_sandbox: Call | None = None  # replaces the function if the episode has a sandbox, its first argument

    @property
    def name(self) -> str:
        """Return the name that replies use."""
        return self.spec["function"]["name"]


class ToolEnvironment:
    """An environment that returns each tool call's result or "error: ..."; a reply without calls ends the episode."""

    def __init__(self, calls: Mapping[str, Call], in_sandbox: Mapping[str, Call] | None = None) -> None:
        self._calls, self._in_sandbox = {**calls}, in_sandbox or {}
        self._times: list[tuple[str, float, float]] = []

    def reset(self, task: Task) -> Observation:
        """Return an observation without messages."""
        if task.sandbox is not None:
            self._calls |= {name: partial(function, task.sandbox) for name, function in self._in_sandbox.items()}
        return Observation([])

    def step(self, reply: Reply) -> Observation | Done:
        """Return one message per tool call."""
        if not reply.tool_calls:
            return Done()
        return Observation([{"role": "tool", "content": self._run(call)} for call in reply.tool_calls])

    def take_calls(self) -> list[tuple[str, float, float]]:
        """Return name, start and end, by `time.monotonic`, of the calls since the last call of this method."""
        times, self._times = self._times, []
        return times

    def _run(self, call: ToolCall) -> str:
        if call.arguments is None:
            return 'error: a tool call is an object with a "name" and "arguments"'
        if call.name not in self._calls:
            return f"error: there is no tool {call.name[:100]}; there are {', '.join(self._calls)}"
        started = time.monotonic()
        try:
            result = self._calls[call.name](**call.arguments)
        except Exception as error:  # tools can raise anything
            result = f"error: {type(error).__name__}: {error}"
        self._times.append((call.name, started, time.monotonic()))
        text = result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
        return text if len(text) <= _LONGEST_RESULT else f"{text[:_LONGEST_RESULT]} ({len(text)} characters, cut)"


def describe_function(function: Call) -> dict[str, Any]:
    """Build a tool spec from a function's name, first docstring paragraph, and type hints."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    properties = {parameter.name: _describe_type(hints.get(parameter.name)) for parameter in parameters}
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    return {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split()),
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _describe_type(hint: Any) -> dict[str, Any]:
    """Convert a type hint to JSON schema, or {} (any value)."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [argument for argument in arguments if argument is not type(None)]
        return _describe_type(kinds[0]) if len(kinds) == 1 else {}
    if origin is typing.Literal:
        return {"type": _TYPES.get(type(arguments[0]), "string"), "enum": list(arguments)}
    found: dict[str, Any] = {"type": _TYPES[origin]} if origin in _TYPES else {}
    if origin is list and arguments:
        found["items"] = _describe_type(arguments[0])
    return found
