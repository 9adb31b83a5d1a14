# SPDX-License-Identifier: Apache-2.0
"""Parsing and validation of requests to an episode's endpoint; pure functions.

The run's settings fix how replies are sampled, because training uses the same ones; the error for any other value names
the setting.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from megatron_rl.agents.transcript import Message

# Accepted and ignored.
_WITHOUT_EFFECT = {"model", "stream", "stream_options", "user", "metadata", "store", "parallel_tool_calls"}
_WITHOUT_EFFECT |= {"service_tier", "prompt_cache_key", "safety_identifier", "cache_salt", "priority", "request_id"}
_WITHOUT_EFFECT |= {"return_token_ids", "skip_special_tokens", "spaces_between_special_tokens"}
# Field -> its only accepted value, and the setting that fixes it.
_FIXED: dict[str, tuple[Any, str]] = {
    "top_p": (1.0, "rollout.top_p"),
    "top_k": (-1, "rollout.top_k"),
    "min_p": (0.0, "rollout.min_p"),
    "n": (1, "rollout.n"),
    "best_of": (1, "rollout.n"),
    "seed": (None, "trainer.seed"),
    "stop": (None, "rollout.stop"),
    "frequency_penalty": (0.0, "the section rollout, which has no penalties"),
    "presence_penalty": (0.0, "the section rollout, which has no penalties"),
    "repetition_penalty": (1.0, "the section rollout, which has no penalties"),
    "logit_bias": (None, "the section rollout, which has no biases"),
}
_CHAT = {"messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"}
_TEXT = {"prompt", "max_tokens", "echo", "suffix"}
_GENERATE = {"token_ids", "sampling_params"}
_SAMPLING_PARAMS = {"max_tokens", "stop_token_ids", "logprobs"}
_KINDS = {"model": str, "return_token_ids": bool, "logprobs": int, "tools": list, "sampling_params": dict}
_KINDS |= {"stop_token_ids": list, "stream": bool, "stream_options": dict, "include_usage": bool, "tool_calls": list}
_KINDS |= {"parameters": dict, "arguments": dict, "function": dict, "name": str}


class BadRequest(ValueError):
    """An unsupported request; the program receives status 400."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def read_json(text: str | bytes) -> Any:
    """Parse JSON; BadRequest also for deep nesting, NaN, infinities and lone surrogates."""
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(found, ensure_ascii=False).encode()  # refuses lone surrogates, which tokenizers cannot encode
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"this is no JSON: {error}") from error
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def read_stream(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether to stream the answer, and whether to stream its token counts; raises BadRequest."""
    options = _get(body, "stream_options") or {}
    return bool(_get(body, "stream")), bool(_get(options, "include_usage"))


def _get(body: Mapping[str, Any], field: str) -> Any:
    """Return the value of a field of `_KINDS`, or `None`; BadRequest for another type."""
    value, kind = body.get(field), _KINDS[field]
    if value is not None and not isinstance(value, kind):
        raise BadRequest(f"{field} = {value!r} is no {kind.__name__}", field)
    return value


def check_fields(body: Mapping[str, Any], known: Collection[str], temperature: float) -> None:
    """Refuse fields and values that the endpoint does not support (BadRequest); null fields count as omitted."""
    fixed = {**_FIXED, "temperature": (temperature, "rollout.temperature")}
    for field, value in body.items():
        if field in _KINDS:
            _get(body, field)
        if value is None or field in known or field in _WITHOUT_EFFECT:
            continue
        if field not in fixed:
            raise BadRequest(f"{field} is not known here; leave it out", field)
        expected, setting = fixed[field]
        if value != expected and not (expected is None and value in ([], {}, "")):
            only = "leave it out" if expected is None else f"leave it out, or say {expected}"
            raise BadRequest(f"{field} = {value!r}: {setting} decides this; {only}", field)


def read_chat(body: Mapping[str, Any], temperature: float) -> tuple[list[Message], list[Any]]:
    """Return messages and tools of a /v1/chat/completions request for the chat template; raises BadRequest."""
    check_fields(body, _CHAT, temperature)
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise BadRequest("messages must be a list with at least one message", "messages")
    if body.get("top_logprobs"):
        raise BadRequest(
            "top_logprobs: only the log-prob of the sampled token is known here; leave it out", "top_logprobs"
        )
    choice, tools = body.get("tool_choice") or "auto", body.get("tools") or []
    for tool in tools:
        _get(_read_function(tool), "parameters")
    if choice not in ("auto", "none"):
        raise BadRequest(f"tool_choice = {choice!r}: the policy is free to call tools or not; say auto", "tool_choice")
    return [_read_message(message) for message in given], tools if choice == "auto" else []


def read_text(body: Mapping[str, Any], temperature: float) -> str | list[int]:
    """Return the text or tokens of a /v1/completions request; raises BadRequest."""
    check_fields(body, _TEXT, temperature)
    prompt = body.get("prompt")
    if body.get("echo") or body.get("suffix"):
        raise BadRequest("echo and suffix are not done here; leave them out", "echo")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if not isinstance(prompt, str):
        return _read_tokens(prompt, "prompt")
    if not prompt:
        raise BadRequest("the prompt is empty", "prompt")
    return prompt


def read_generate(body: Mapping[str, Any], temperature: float, stop_token_ids: tuple[int, ...]) -> list[int]:
    """Return the tokens of an /inference/v1/generate request; raises BadRequest."""
    check_fields(body, _GENERATE, temperature)
    params = body.get("sampling_params") or {}
    check_fields(params, _SAMPLING_PARAMS, temperature)
    if body.get("stream"):
        raise BadRequest("stream: tokens come in one answer here; leave it out", "stream")
    if further := [token for token in params.get("stop_token_ids") or [] if token not in stop_token_ids]:
        raise BadRequest(f"stop_token_ids {further}: rollout.stop_token_ids decides this", "stop_token_ids")
    return _read_tokens(body.get("token_ids"), "token_ids")


def read_limit(body: Mapping[str, Any]) -> int | None:
    """Return the request's limit on reply tokens, if any; raises BadRequest."""
    params = body.get("sampling_params") or {}
    for place in (body.get("max_completion_tokens"), body.get("max_tokens"), params.get("max_tokens")):
        if place is not None:
            if type(place) is not int or place < 1:
                raise BadRequest(f"max_tokens = {place!r} is no whole number above 0", "max_tokens")
            return place
    return None


def _read_tokens(value: Any, field: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
        raise BadRequest(f"{field} must be a text or a list of token ids", field)
    return value


def _read_message(message: Any) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise BadRequest("a message is an object with a role and a content", "messages")
    content = message.get("content")
    if not isinstance(content, str | None):
        parts = content if isinstance(content, list) else [None]
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
        strings = [text for text in texts if isinstance(text, str)]
        if len(strings) < len(texts):
            raise BadRequest("a content is a text, or a list of parts of the type text", "messages")
        content = "".join(strings)
    found: Message = {"role": "system" if role == "developer" else role, "content": content or ""}
    if calls := _get(message, "tool_calls"):
        found["tool_calls"] = [_read_call(call) for call in calls]
    return found | {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}


def _read_call(call: Any) -> dict[str, Any]:
    function = _read_function(call)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    function = {"name": function["name"], "arguments": _get({"arguments": arguments}, "arguments")}
    return {"type": "function", "id": call.get("id"), "function": function}


def _read_function(owner: Any) -> dict[str, Any]:
    function = _get(owner, "function") if isinstance(owner, dict) else None
    if function is None or _get(function, "name") is None:
        raise BadRequest("a tool, or a call of it, is an object with a function that has a name", "function")
    return function
