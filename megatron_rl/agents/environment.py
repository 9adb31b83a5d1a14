# SPDX-License-Identifier: Apache-2.0
"""The environment interface, and the registry for `agents.environment`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from megatron_rl.agents.transcript import Message
from megatron_rl.extension.user_code import import_file
from megatron_rl.rewards.scoring import LARGEST, check_name
from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.agents.sandbox import Sandbox

SETTING = "agents.environment"


@dataclass(frozen=True)
class Task:
    """The input of an episode."""

    prompt: str
    # ground_truth, data_source, extra_info, row: see `types.Prompt`.
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any]
    row: dict[str, Any]
    seed: int  # equal for all episodes on a prompt; `random` is already seeded with it
    messages: list[Message] | None = None  # the prompt as chat messages, or `None` for plain text
    tools: list[Any] = field(default_factory=list)  # in OpenAI format
    sandbox: Sandbox | None = None  # the episode's own, or `None` without `agents.sandbox`


@dataclass(frozen=True)
class ToolCall:
    """A tool call of a reply; `arguments` is `None` for a malformed call. Chat templates need the id."""

    name: str
    arguments: dict[str, Any] | None
    id: str = ""


@dataclass(frozen=True)
class Reply:
    """One reply of the policy."""

    text: str  # without special tokens
    tool_calls: list[ToolCall]  # parsed by `agents.tool_format`
    finish_reason: str  # "stop", or "length" if truncated


@dataclass(frozen=True)
class Observation:
    """An environment's answer that continues the episode.

    Attributes:
        messages: shown to the policy next, with "role" and "content".
        reward: of this turn.
        state: name of the environment's state, for estimators that compare turns in equal states (gigpo); by default
            the contents of the messages.
    """

    messages: list[Message]
    reward: float | None = None
    state: str | None = None


@dataclass(frozen=True)
class Done:
    """The end of an episode.

    Attributes:
        reward: of the last turn. Turn rewards are summed; if there are none, the run's reward sources score the last
            reply.
        components: name -> value, logged as reward/<name>.
    """

    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """Interface of environments: any class with these methods and a constructor without arguments."""

    def reset(self, task: Task) -> Observation:
        """Start the episode; return messages to append to the task's, usually none."""
        ...

    def step(self, reply: Reply) -> Observation | Done:
        """Answer a reply of the policy with an observation, or end the episode with `Done`."""
        ...


# Prefix of a name -> module and function(prefix, rest) that returns the factory.
ADAPTERS = {
    "textarena": ("megatron_rl.agents.adapters.games", "find_game"),
    "gem": ("megatron_rl.agents.adapters.games", "find_game"),
    "reasoning-gym": ("megatron_rl.agents.adapters.games", "find_game"),
    "verifiers": ("megatron_rl.agents.adapters.games", "find_game"),
    "openenv": ("megatron_rl.agents.adapters.openenv", "find_server"),
    "harbor": ("megatron_rl.agents.adapters.harbor", "find_tasks"),
}


def find_environment(name: str) -> Callable[[], Environment]:
    """Return the factory for a value of `agents.environment` (UserError if there is none or it lacks a method)."""
    if name == "calculator":
        return Calculator
    kind, _, rest = name.partition(":")
    if kind in ADAPTERS:
        module, attribute = ADAPTERS[kind]
        return getattr(import_module(module), attribute)(kind, rest)
    path, _, attribute = name.rpartition(":")
    expected = ", ".join(["path.py:Name", "calculator", *(f"{kind}:NAME" for kind in ADAPTERS)])
    if not path or not attribute:
        raise UserError(
            f'"{name}" names no environment',
            source=SETTING,
            expected=expected,
            hint="write the file and the class, e.g. my_environment.py:Game",
        )
    found = getattr(import_file(path, SETTING, expected), attribute, None)
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if missing:
        raise UserError(
            f'the file defines no "{attribute}"' if found is None else f'"{attribute}" has no method {missing[0]}',
            source=f"{SETTING} = {name}",
            expected="a class with reset(task) and step(reply)",
            hint="see docs/agents.md",
        )
    return cast(Callable[[], Environment], found)


def check_answer(answer: Any) -> Observation | Done:
    """Validate an environment's answer and return it.

    Raises:
        TypeError: the answer or a message has a wrong type.
        ValueError: a number is not finite or exceeds `LARGEST`, or a component's name is no metric name.
    """
    if not isinstance(answer, Observation | Done):
        raise TypeError(f"a {type(answer).__name__} instead of Observation or Done")
    numbers = [("reward", answer.reward)] if answer.reward is not None else []
    if isinstance(answer, Done):
        numbers += [(check_name(name), value) for name, value in answer.components.items()]
    else:
        if not isinstance(answer.state, str | None):
            raise TypeError(f"a state that is a {type(answer.state).__name__} instead of a text")
        for message in answer.messages:
            texts = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError(f"the message {str(message)[:100]!r} without a role and a content that are texts")
    for name, value in numbers:
        if not abs(value) <= LARGEST:
            raise ValueError(f"{name} = {value}; numbers are at most {LARGEST:g} in size, so that sums are finite")
    return answer


# Goes into the column `tools` of a data file.
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as (12 + 3) * 4."}},
            "required": ["expression"],
        },
    },
}
_IN_BRACKETS = re.compile(r"\[([^\[\]]*)\]\s*$")
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_LONGEST = 200  # characters; bounds the size of products


class Calculator:
    """The environment `calculator`: evaluates expressions; any other reply is the final answer.

    In a chat, a reply calls the function `calculate(expression)` (see `TOOL`). After a plain-text prompt, it ends with
    an expression in brackets: "[12*34]" is answered by "[408]".
    """

    def reset(self, task: Task) -> Observation:
        """Return an observation without messages."""
        return Observation([])

    def step(self, reply: Reply) -> Observation | Done:
        """Evaluate a reply's expressions, or end the episode."""
        results = [
            calculate(str((call.arguments or {}).get("expression", ""))) if call.name == "calculate" else "error"
            for call in reply.tool_calls
        ]
        asked = _IN_BRACKETS.search(reply.text)
        if asked and not results:
            results = [f"[{calculate(asked[1])}]"]
        return Observation([{"role": "tool", "content": result} for result in results]) if results else Done()


def calculate(expression: str) -> str:
    """Evaluate numbers with + - * / // % and parentheses; return the value as text, or "error"."""
    try:
        if len(expression) > _LONGEST:
            return "error"
        return str(_compute(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "error"


def _compute(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_compute(left), _compute(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_compute(operand))
    raise ValueError(f"{type(node).__name__} in an expression")
