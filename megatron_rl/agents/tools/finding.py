# SPDX-License-Identifier: Apache-2.0
"""Tools named in `agents.tools`: functions, the calculator, Python, search in a corpus, and MCP servers."""

from __future__ import annotations

import asyncio
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.agents.environment import TOOL, calculate
from megatron_rl.agents.tools import confinement
from megatron_rl.agents.tools.tool import Tool, describe_function
from megatron_rl.data.rows import read_rows
from megatron_rl.extension.user_code import import_file
from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.agents.sandbox import Sandbox

SETTING = "agents.tools"
_EXPECTED = "calculator, python, bash, search:CORPUS.jsonl, mcp:COMMAND, or path.py:function"


def find_tools(names: Sequence[str]) -> list[Tool]:
    """Find tools by the names in `agents.tools`, without loading their functions.

    Raises:
        UserError: a tool is missing, or two share a name.
    """
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
    """Return one line per sandbox layer that the kernel does not allow, if the tool `python` is among the names."""
    missing = find_missing_layers() if "python" in names else {}
    return [f"the tool python runs without its layer {layer}: {reason}" for layer, reason in missing.items()]


def _find(name: str) -> list[Tool]:
    kind, _, rest = name.partition(":")
    if name == "calculator":
        return [Tool(TOOL, lambda: calculate)]
    if name == "python":
        return [Tool(describe_function(run_python), lambda: run_python, run_python_in)]
    if name == "bash":
        return [Tool(describe_function(bash), lambda: bash, run_in)]
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
    """Return the sandbox layers that the kernel or the container does not allow: layer -> reason."""
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


def run_python_in(sandbox: Sandbox, code: str) -> str:
    """Run a Python program in a sandbox."""
    return sandbox.run("python3 -", code.encode(), most_bytes=_LONGEST_OUTPUT).describe()


def bash(command: str) -> str:
    """Run a shell command. Files and programs in the background stay until the end."""
    raise NotImplementedError  # only the tool's spec is taken from here


def run_in(sandbox: Sandbox, command: str) -> str:
    """Run a shell command in a sandbox."""
    return sandbox.run(command, most_bytes=_LONGEST_OUTPUT).describe()


_K1, _B = 1.2, 0.75
_WORD = re.compile(r"\w+")
_MOST = 10  # results
_LONGEST_PASSAGE = 2000  # characters


class Bm25:
    """A BM25 index of texts (Robertson and Zaragoza 2009).

    The score of a passage d for a query is the sum over its words w of

        log(1 + (N - n_w + 0.5) / (n_w + 0.5)) * f * (k1 + 1) / (f + k1 * (1 - b + b * |d| / mean |d|))

    with N passages, of which n_w contain w, and f occurrences of w in d.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(_WORD.findall(text.lower())) for text in texts]
        lengths = np.array([max(count.total(), 1) for count in counts], np.float32)
        self._penalties = _K1 * (1 - _B + _B * lengths / lengths.mean())
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for index, count in enumerate(counts):
            for word, times in count.items():
                found[word].append((index, times))
        self._found = {word: np.array(pairs, np.int32).T for word, pairs in found.items()}  # [2, n] text index, count

    def find(self, query: str, most: int) -> list[int]:
        """Return indices of the best texts, best first, that contain a word of the query."""
        total = len(self._penalties)
        scores = np.zeros(total, np.float64)
        for word in _WORD.findall(query.lower()):
            if word in self._found:
                places, times = self._found[word]
                weight = math.log(1 + (total - len(places) + 0.5) / (len(places) + 0.5))
                scores[places] += weight * times * (_K1 + 1) / (times + self._penalties[places])
        best = np.argsort(-scores, kind="stable")[:most]
        return [int(place) for place in best if scores[place] > 0]


def search(query: str, num_results: int = 3) -> str:
    """Find passages about a question in the corpus."""
    raise NotImplementedError  # only the tool's spec is taken from here; `find_search` builds the function


def find_search(corpus: str) -> Tool:
    """Return the tool for a corpus file with columns `text` and optionally `title` (UserError if missing)."""
    if not Path(corpus).is_file():
        raise UserError(
            f"{corpus or 'no file'}: there is no such corpus",
            source=f"agents.tools = search:{corpus}",
            expected="a JSONL or parquet file with a column text",
            hint="write one passage per row",
        )

    def load() -> Any:
        rows = [row.columns | {"text": row.scalar_text("text")} for row in read_rows([corpus])]
        passages = [f"{row['title']}\n{row['text']}" if row.get("title") else row["text"] for row in rows]
        index = Bm25(passages)

        def find(query: str, num_results: int = 3) -> str:
            places = index.find(query, max(1, min(int(num_results), _MOST)))
            texts = [f"[{i}] {passages[place][:_LONGEST_PASSAGE]}" for i, place in enumerate(places, start=1)]
            return "\n\n".join(texts) or "nothing found"

        return find

    return Tool(describe_function(search), load)


_START_SECONDS = 60.0


def list_mcp_tools(command: str) -> list[Tool]:
    """Start an MCP server (over stdin and stdout), return its tools, and stop it.

    An episode's first call of a tool starts a server that ends with the episode's process.

    Raises:
        UserError: the package `mcp` is missing, or the server does not start.
    """
    try:
        found = asyncio.run(asyncio.wait_for(_list(command), _START_SECONDS))
    except Exception as error:  # the package raises exception groups of many types
        raise UserError(
            f"the MCP server does not list its tools: {_describe(error)}",
            source=f"agents.tools = mcp:{command}",
            expected="a command that serves MCP over stdin and stdout, and the package mcp",
            hint=f"try the command by hand: {command}; pip install mcp",
        ) from error
    server, tools = _Server(command), []
    for tool in found:
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        call = partial(server.call, tool.name)
        tools.append(Tool({"type": "function", "function": function}, lambda call=call: call))
    return tools


class _Server:
    def __init__(self, command: str) -> None:
        self._command = command
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Any = None

    def call(self, name: str, /, **arguments: Any) -> str:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
            self._client = _open(self._command)
            self._wait(self._client.__aenter__())
        result = self._wait(self._client.call_tool(name, arguments))
        text = "\n".join(part.text if part.type == "text" else f"({part.type})" for part in result.content)
        return f"error: {text}" if result.is_error else text

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _list(command: str) -> list[Any]:
    async with _open(command) as client:
        return (await client.list_tools()).tools


def _open(command: str) -> Any:
    import mcp  # optional, and a slow import

    program, *arguments = shlex.split(command)
    return mcp.Client(mcp.StdioServerParameters(command=program, args=arguments))


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
