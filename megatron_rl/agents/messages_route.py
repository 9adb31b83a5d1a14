# SPDX-License-Identifier: Apache-2.0
"""The Anthropic-style route /v1/messages: requests as chats of the endpoint, and its replies in the route's form.

A request becomes the body of an equal /v1/chat/completions request: both have the same tokens, and a conversation may
continue by the other route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.agents.requests import BadRequest
from megatron_rl.agents.transcript import Message

_AS_IN_CHATS = {"model", "max_tokens", "temperature", "top_p", "top_k", "stream", "metadata", "service_tier"}
_IGNORED = {"cache_control", "context_management", "output_config"}  # of whole requests
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


def read_messages(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the equal request to /v1/chat/completions (BadRequest)."""
    found = {name: value for name, value in body.items() if name in _AS_IN_CHATS}
    found |= {"top_k": None} if body.get("top_k") in (0, -1) else {}
    found |= {"stop": body["stop_sequences"]} if body.get("stop_sequences") else {}
    known = _AS_IN_CHATS | _IGNORED | {"messages", "system", "tools", "tool_choice", "stop_sequences", "thinking"}
    if unknown := [name for name in body if name not in known and body[name] is not None]:
        raise BadRequest(f"{unknown[0]} is not known here; leave it out", unknown[0])
    if _kind_of(body.get("thinking") or {"type": "disabled"}) not in ("disabled", "adaptive"):
        raise BadRequest("thinking: the chat template decides this; leave it out", "thinking")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", "messages")
    if system := _join(body.get("system") or "", "system"):
        found["messages"] = [{"role": "system", "content": system}]
    found["messages"] = [*found.get("messages", []), *(said for one in messages for said in _read_message(one))]
    found["tools"] = [_read_tool(tool) for tool in body.get("tools") or []]
    found["tool_choice"] = _kind_of(body.get("tool_choice") or {"type": "auto"})
    return found


def _kind_of(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise BadRequest(f"{str(value)[:100]} is no object with a type")
    return kind


def _join(content: Any, field: str) -> str:
    """Return the text of a content: a text, or a list of text blocks."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [None]
    texts = [block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None for block in blocks]
    if not all(isinstance(text, str) for text in texts):
        raise BadRequest("a content is a text, or a list of blocks of the type text", field)
    return "".join(str(text) for text in texts)


def _read_message(message: Any) -> list[Message]:
    """Return the messages of a chat for one message: each tool result is one, before the text beside it."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise BadRequest("a message is an object with the role user or assistant, and a content", "messages")
    role, content = message["role"], message.get("content")
    blocks = content if isinstance(content, list) else []
    kinds = [_kind_of(block) for block in blocks]
    uses = [block for block, kind in zip(blocks, kinds, strict=True) if kind == "tool_use" and role == "assistant"]
    results = [block for block, kind in zip(blocks, kinds, strict=True) if kind == "tool_result" and role == "user"]
    rest = [block for block in blocks if block not in uses and block not in results] if blocks else content
    text = _join(rest if rest is not None else "", "messages")
    if uses:
        calls = [
            {"id": use.get("id"), "function": {"name": use.get("name"), "arguments": use.get("input") or {}}}
            for use in uses
        ]
        return [{"role": role, "content": text, "tool_calls": calls}]
    found = [
        {
            "role": "tool",
            "content": _join(result.get("content") or "", "messages"),
            "tool_call_id": result.get("tool_use_id"),
        }
        for result in results
    ]
    return [*found, {"role": role, "content": text}] if rest or not results else found


def _read_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
        raise BadRequest(
            "a tool is an object with a name and an input_schema; the endpoint has none of its own", "tools"
        )
    function = {name: tool[name] for name in ("name", "description") if name in tool}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def write_reply(message: Message, finish_reason: str) -> dict[str, Any]:
    """Return the fields of a response for a reply of the endpoint."""
    calls = message.get("tool_calls") or []
    blocks: list[dict[str, Any]] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    blocks += [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": call["function"]["arguments"]}
        for call in calls
    ]
    reason = "tool_use" if calls else _STOP_REASONS[finish_reason]
    return {"type": "message", "role": "assistant", "content": blocks, "stop_reason": reason, "stop_sequence": None}
