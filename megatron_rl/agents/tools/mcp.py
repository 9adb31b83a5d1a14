# SPDX-License-Identifier: Apache-2.0
"""Tools of an MCP server over stdin and stdout: `mcp:COMMAND`. Requires the package `mcp`.

Each episode starts its own server at its first call; it ends with the episode's process.
"""

from __future__ import annotations

import asyncio
import shlex
import threading
from collections.abc import Coroutine
from typing import Any

from megatron_rl.agents.tools.tool import Call, Tool
from megatron_rl.types import UserError

_START_SECONDS = 60.0


def list_mcp_tools(command: str) -> list[Tool]:
    """Start a server, list its tools, and stop it.

    Raises:
        UserError: the package `mcp` is missing, or the server does not start.
    """
    try:
        found = asyncio.run(asyncio.wait_for(_list(command), _START_SECONDS))
    except Exception as error:  # the package raises exception groups of many types
        raise UserError(
            f"the MCP server cannot be asked for its tools: {_describe(error)}",
            source=f"agents.tools = mcp:{command}",
            expected="a command that serves MCP over stdin and stdout, and the package mcp",
            hint=f"try the command by hand: {command}; pip install mcp",
        ) from error
    server = _Server(command)
    return [Tool(_write_spec(tool), lambda name=tool.name: server.bind(name)) for tool in found]


class _Server:
    def __init__(self, command: str) -> None:
        self._command = command
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Any = None

    def bind(self, name: str) -> Call:
        return lambda **arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
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


def _write_spec(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
