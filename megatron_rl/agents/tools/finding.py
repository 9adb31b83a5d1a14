# SPDX-License-Identifier: Apache-2.0
"""Resolves the names in `agents.tools` to tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_rl.agents.calculator import TOOL, calculate
from megatron_rl.agents.tools.mcp import list_mcp_tools
from megatron_rl.agents.tools.python import find_missing_layers, run_python
from megatron_rl.agents.tools.search import find_search
from megatron_rl.agents.tools.tool import Tool, describe_function
from megatron_rl.extension.user_code import import_file
from megatron_rl.types import UserError

SETTING = "agents.tools"
_EXPECTED = "calculator, python, search:CORPUS.jsonl, mcp:COMMAND, or path.py:function"


def find_tools(names: Sequence[str]) -> list[Tool]:
    """Return the named tools, not loaded (UserError if one is missing, or two share a name)."""
    tools = [tool for name in names for tool in _find(name)]
    twice = [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]
    if twice:
        raise UserError(
            f'two tools have the name "{twice[0]}"', source=SETTING, expected="a name for each", hint="leave one out"
        )
    return tools


def describe_tools(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tools' specs for the chat template; raises as `find_tools`."""
    return [tool.spec for tool in find_tools(names)]


def describe_gaps(names: Sequence[str]) -> list[str]:
    """Return one line per sandbox layer of the tool `python` that the kernel does not allow."""
    missing = find_missing_layers() if "python" in names else {}
    return [f"the tool python runs without its layer {layer}: {reason}" for layer, reason in missing.items()]


def _find(name: str) -> list[Tool]:
    kind, _, rest = name.partition(":")
    if name == "calculator":
        return [Tool(TOOL, lambda: calculate)]
    if name == "python":
        return [Tool(describe_function(run_python), lambda: run_python)]
    if kind == "search":
        return [find_search(rest)]
    if kind == "mcp":
        return list_mcp_tools(rest)
    path, _, attribute = name.rpartition(":")
    function = getattr(import_file(path, SETTING, _EXPECTED), attribute, None) if path.endswith(".py") else None
    if not callable(function):
        raise UserError(
            f'"{name}" names no tool', source=SETTING, expected=_EXPECTED, hint="write a function with typed arguments"
        )
    return [Tool(describe_function(function), lambda: function)]
