# SPDX-License-Identifier: Apache-2.0
"""Requests to an episode's endpoint: the server that receives them, and their parsing and validation.

The run's settings fix how replies are sampled, because training uses the same ones; the error for any other value names
the setting.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron_rl.agents.transcript import Message

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES = "/v1/messages"

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
_CHAT_FIELDS = {"messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"}
_TEXT_FIELDS = {"prompt", "max_tokens", "echo", "suffix"}
_GENERATE_FIELDS = {"token_ids", "sampling_params"}
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
    check_fields(body, _CHAT_FIELDS, temperature)
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
    check_fields(body, _TEXT_FIELDS, temperature)
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
    check_fields(body, _GENERATE_FIELDS, temperature)
    params = body.get("sampling_params") or {}
    check_fields(params, _SAMPLING_PARAMS, temperature)
    if body.get("stream"):
        raise BadRequest("stream: tokens come in one answer here; leave it out", "stream")
    if further := [token for token in params.get("stop_token_ids") or [] if token not in stop_token_ids]:
        raise BadRequest(f"stop_token_ids {further}: rollout.stop decides this", "stop_token_ids")
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


def split_into_chunks(answer: Mapping[str, Any], with_usage: bool) -> list[dict[str, Any]]:
    """Split a response into streaming chunks: the reply, the finish reason, and optionally the usage."""
    (choice,) = answer["choices"]
    head = {name: answer[name] for name in ("id", "created", "model", "object")}
    whole = {**choice, "finish_reason": None}
    ending = {"index": 0, "finish_reason": choice["finish_reason"], "logprobs": None}
    if message := whole.pop("message", None):
        head["object"] = "chat.completion.chunk"
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or [])]
        whole["delta"] = {**message, **({"tool_calls": calls} if calls else {})}
        ending["delta"] = {}
    else:
        ending["text"] = ""
    chunks = [head | {"choices": [whole]}, head | {"choices": [ending]}]
    return chunks + ([head | {"choices": [], "usage": answer["usage"]}] if with_usage else [])


def split_into_events(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed response, each block in one piece."""
    usage = {**answer["usage"], "output_tokens": 0}
    yield {"type": "message_start", "message": {**answer, "content": [], "stop_reason": None, "usage": usage}}
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": start}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ending, "usage": answer["usage"]}
    yield {"type": "message_stop"}


_LARGEST_BODY = 32 << 20  # bytes
_LONGEST_MESSAGE = 1000  # characters


class EndpointServer(ThreadingHTTPServer):
    """A server for one endpoint, with a thread per connection.

    Args:
        list_models: returns the response body of /v1/models.
        answer: (path, body of a request) -> response body.

    Attributes:
        token: bearer token that requests must carry.
        url: base URL, without /v1.
    """

    def __init__(
        self, list_models: Callable[[], dict[str, Any]], answer: Callable[[str, dict[str, Any]], dict[str, Any]]
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.list_models, self.answer, self.token = list_models, answer, secrets.token_urlsafe(16)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def serve_on(self, listener: socket.socket) -> None:
        """Serve requests from another listening socket, too."""

        def accept() -> None:
            while True:
                self.process_request(*listener.accept())

        threading.Thread(target=accept, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: EndpointServer
    protocol_version = "HTTP/1.1"  # one connection for many requests
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body in one packet

    def do_GET(self) -> None:
        """Answer /v1/models with the list of models, and a path below it with the only model."""
        path = self.path.partition("?")[0]
        if self._read_body() is None:
            return
        models = self.server.list_models()
        if path == "/v1/models":
            self._send(200, models)
        elif path.startswith("/v1/models/"):
            self._send(200, models["data"][0])
        else:
            self._refuse(404, f"there is no {path} here")

    def do_POST(self) -> None:
        """Answer a completion request."""
        body, path = self._read_body(), self.path.partition("?")[0]
        if body is None:
            return
        if path not in (CHAT, TEXT, GENERATE, MESSAGES):
            self._refuse(404, f"there is no {path} here")
            return
        try:
            request = read_json(body)
            if not isinstance(request, dict):
                raise BadRequest("the body is no object")
            options = _get(request, "stream_options") or {}
            is_streamed, with_usage = bool(_get(request, "stream")), bool(_get(options, "include_usage"))
            answer = self.server.answer(path, request)
        except BadRequest as error:
            self._refuse(400, str(error), error.field)
            return
        except RecursionError:
            self._refuse(400, "the body is nested too deeply")
            return
        except Exception as error:  # the program receives the message of any error
            self._refuse(500, f"{type(error).__name__}: {error}")
            return
        if is_streamed and path == MESSAGES:
            events = [(event["type"], json.dumps(event)) for event in split_into_events(answer)]
            self._write("".join(f"event: {name}\ndata: {line}\n\n" for name, line in events), "text/event-stream")
        elif is_streamed:
            lines = [json.dumps(chunk) for chunk in split_into_chunks(answer, with_usage)]
            self._write("".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]), "text/event-stream")
        else:
            self._send(200, answer)

    def handle_expect_100(self) -> bool:
        """Check the headers of a request with "Expect: 100-continue" before the client sends the body."""
        return self._is_welcome() and super().handle_expect_100()

    def _read_body(self) -> bytes | None:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0)) if self._is_welcome() else None

    def _is_welcome(self) -> bool:
        """Return whether a request has the bearer token and an allowed length; otherwise refuse it.

        A refusal closes a connection with an unread body.
        """
        length, is_chunked = self.headers.get("Content-Length") or "0", "Transfer-Encoding" in self.headers
        given, expected = self.headers.get("Authorization") or "", f"Bearer {self.server.token}"
        if (key := self.headers.get("x-api-key")) is not None:  # Anthropic's header
            given = f"Bearer {key}"
        refusal = None
        if not hmac.compare_digest(given.encode(), expected.encode()):
            refusal = 401, "this is the endpoint of another episode: the key is in the variable OPENAI_API_KEY"
        elif is_chunked:
            refusal = 411, "a body needs a Content-Length here"
        elif not length.isdecimal():
            refusal = 400, f"Content-Length = {length} is no number"
        elif len(length) > 12 or int(length) > _LARGEST_BODY:
            refusal = 413, f"a body has at most {_LARGEST_BODY} bytes here"
        if refusal is not None:
            self.close_connection |= is_chunked or length != "0"
            self._refuse(*refusal)
        return refusal is None

    def _refuse(self, status: int, message: str, field: str | None = None) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message[:_LONGEST_MESSAGE], "type": kind, "param": field, "code": None}
        self._send(status, {"type": "error", "error": error})

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        self._write(json.dumps(body), "application/json", status)

    def _write(self, text: str, kind: str, status: int = 200) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
