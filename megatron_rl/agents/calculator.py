# SPDX-License-Identifier: Apache-2.0
"""The environment `calculator`: evaluates expressions; any other reply is the final answer.

In a chat, a reply calls the function `calculate(expression)` (see `TOOL`). After a plain-text prompt, a reply ends with
an expression in brackets: "[12*34]" is answered by "[408]".
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from megatron_rl.agents.environment import Done, Observation, Reply, Task

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
    """An environment with one tool."""

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
