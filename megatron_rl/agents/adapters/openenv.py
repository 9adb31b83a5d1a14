# SPDX-License-Identifier: Apache-2.0
"""Environments on an OpenEnv server: `openenv:http://HOST:PORT`. Requires `websockets`, a dependency of vLLM.

An episode is one WebSocket session on /ws with "reset" and "step" messages (openenv 0.10,
https://github.com/meta-pytorch/OpenEnv). The server's action schema determines how a reply becomes an action:

    tools (MCP)            each tool call is a step; a reply without calls ends the episode
    one text field         the reply's text
    otherwise              the reply's text, parsed as JSON
"""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_rl.agents.environment import Done, Environment, Message, Observation, Reply, Task, ToolCall
from megatron_rl.types import UserError

_START_SECONDS = 30.0


class InvalidAction(ValueError):
    """An action that the server rejects; the policy receives the message."""


class OpenEnvironment:
    """An episode on an OpenEnv server.

    A subclass for `agents.environment` has a constructor without arguments, and may override `read_action` and
    `write_observation`.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._open = contextlib.ExitStack()  # closed at exit of the episode's process
        self._socket: Any = None
        self._schema: dict[str, Any] = {}

    def reset(self, task: Task) -> Observation:
        """Start the episode with the task's seed and the row's `extra_info.reset`.

        Raises:
            RuntimeError: the server reports an error, or that the episode is over.
        """
        from websockets.sync.client import connect  # optional

        self._schema = read_schema(self._url)
        url = f"ws{self._url.removeprefix('http')}/ws"
        self._socket = self._open.enter_context(connect(url, open_timeout=_START_SECONDS, max_size=None))
        found = self._ask("reset", {"seed": task.seed, **task.extra_info.get("reset", {})})
        if found["done"]:
            raise RuntimeError("the server says after reset that the episode is over")
        return Observation(self._show("user", found), found["reward"])

    def step(self, reply: Reply) -> Observation | Done:
        """Send the reply's action; the policy receives the error if the server rejects it."""
        if takes_tools(self._schema):
            return self._call(reply.tool_calls)
        try:
            found = self._ask("step", self.read_action(reply))
        except InvalidAction as error:
            return Observation([{"role": "user", "content": f"error: {error}"}])
        if found["done"]:
            return Done(found["reward"])
        return Observation(self._show("user", found), found["reward"])

    def read_action(self, reply: Reply) -> dict[str, Any]:
        """Parse the action from a reply (InvalidAction if it is not a JSON object)."""
        properties = {name: spec for name, spec in self._schema["properties"].items() if name != "metadata"}
        needed = self._schema.get("required", [])
        if len(needed) == 1 and properties.get(needed[0], {}).get("type") == "string":
            return {needed[0]: reply.text}
        try:
            action = json.loads(reply.text)
        except ValueError as error:
            raise InvalidAction(f"the reply must be a JSON object with {', '.join(properties)}: {error}") from error
        if not isinstance(action, dict):
            raise InvalidAction(f"the reply must be a JSON object with {', '.join(properties)}")
        return action

    def write_observation(self, observation: dict[str, Any]) -> str:
        """Format an observation as text: its only field if that is text, else its non-empty fields as JSON."""
        shown = {name: x for name, x in observation.items() if name != "metadata" and x not in (None, "", [], {})}
        texts = [*shown.values()]
        return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else json.dumps(shown, ensure_ascii=False)

    def _show(self, role: str, found: dict[str, Any]) -> list[Message]:
        text = self.write_observation(found["observation"])
        return [{"role": role, "content": text}] if text != "{}" else []

    def _call(self, calls: list[ToolCall]) -> Observation | Done:
        messages: list[Message] = []
        reward = None
        for call in calls:
            action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            try:
                found = self._ask("step", action)
            except InvalidAction as error:
                messages.append({"role": "tool", "content": f"error: {error}"})
                continue
            if found["reward"] is not None:
                reward = (reward or 0.0) + found["reward"]
            if found["done"]:
                return Done(reward)
            messages.append({"role": "tool", "content": _write_result(found["observation"])})
        return Observation(messages, reward) if messages else Done()

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):  # a full server sends an error and closes the connection
            self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._socket.recv())
        found = answer["data"]
        if answer["type"] != "error":
            return {"reward": None, "done": False, **found}
        if found.get("code") == "VALIDATION_ERROR":
            raise InvalidAction("; ".join(str(error["msg"]) for error in found.get("errors", [])) or found["message"])
        hint = ": lower agents.episodes_in_flight" if found.get("code") == "CAPACITY_REACHED" else ""
        raise RuntimeError(f"the OpenEnv server says {found['message']}{hint}")


def _write_result(observation: dict[str, Any]) -> str:
    if error := observation.get("error"):
        return f"error: {error['message']}"
    result = observation.get("result")
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        return "\n".join(part.get("text", f"({part['type']})") for part in result["content"])
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


@dataclass(frozen=True)
class _Server:
    """A factory for a server's environments."""

    url: str
    tools: list[dict[str, Any]]

    def __call__(self) -> Environment:
        return OpenEnvironment(self.url)


def find_server(kind: str, url: str) -> Callable[[], Environment]:
    """Return a server's environment factory (UserError if the server does not answer)."""
    found: list[Any] = []
    try:
        if takes_tools(read_schema(url)):
            list_tools = {"action": {"type": "list_tools"}}
            found = _fetch(f"{url.rstrip('/')}/step", list_tools)["observation"]["tools"]
        functions = [
            {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
            for tool in found
        ]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"the OpenEnv server does not answer: {type(error).__name__}: {error}",
            source=f"agents.environment = {kind}:{url}",
            expected="the URL of an OpenEnv server, such as openenv:http://127.0.0.1:8000",
            hint=f"start it, and try: curl {url}/schema",
        ) from error
    return _Server(url, [{"type": "function", "function": function} for function in functions])


def read_schema(url: str) -> dict[str, Any]:
    """Fetch the JSON schema of an OpenEnv server's actions; raises OSError, ValueError or KeyError."""
    return _fetch(f"{url.rstrip('/')}/schema")["action"]


def takes_tools(schema: dict[str, Any]) -> bool:
    """Return whether the actions of a schema are MCP tool calls."""
    return "tool_name" in schema["properties"]


def _fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_START_SECONDS) as answer:
        return json.loads(answer.read())
