# SPDX-License-Identifier: Apache-2.0
"""Names of `agents.tools` as tools; `run_python`, which confines a program by `confinement`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_rl.agents.calculator import TOOL, calculate
from megatron_rl.agents.tools import confinement
from megatron_rl.agents.tools.mcp import list_mcp_tools
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


_SECONDS = 10
_LONGEST_OUTPUT = 4000  # bytes; longer output keeps its first and last half


def find_missing_layers() -> dict[str, str]:
    """Return layer of `confinement` -> reason why the kernel or the container does not allow it."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-I", "-B", confinement.__file__, directory]
        said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    return dict(line.split(": ", 1) for line in said.splitlines())


def run_python(code: str) -> str:
    """Run a Python program. Print what you want to see."""
    directory = tempfile.mkdtemp(prefix="megatron_rl_python_")
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.run(
                [sys.executable, "-I", "-B", confinement.__file__, directory, str(_SECONDS)],
                input=code.encode(),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUTF8": "1"},
                start_new_session=True,
                check=False,
            )
        finally:
            subprocess.run(["rm", "-rf", directory], check=False)  # shutil fails on very deep directories
        length = output.seek(0, os.SEEK_END)
        output.seek(0)
        text = output.read(_LONGEST_OUTPUT // 2)
        if length > _LONGEST_OUTPUT:
            text += f"\n({length} bytes, cut)\n".encode()
            output.seek(length - _LONGEST_OUTPUT // 2)
        text += output.read(_LONGEST_OUTPUT)
    end = f"error: ended with code {process.returncode}" if process.returncode and not text else ""
    return text.decode(errors="replace") + end
