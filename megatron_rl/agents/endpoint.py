# SPDX-License-Identifier: Apache-2.0
"""Request handling of an episode's OpenAI-compatible endpoint, one request (a turn) at a time.

docs/agents.md lists its routes. A repeated request (a retry) gets the first answer again.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from megatron_rl.agents.conversations import Context, Conversations
from megatron_rl.agents.episode import Opening, Setup
from megatron_rl.agents.requests import (
    BadRequest,
    read_chat,
    read_generate,
    read_json,
    read_limit,
    read_stream,
    read_text,
)
from megatron_rl.agents.tool_formats import read_reply, require_format, require_shown, shows_tools
from megatron_rl.agents.transcript import Message
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.types import UserError

_CHAT, _TEXT, _GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
PATHS = (_CHAT, _TEXT, _GENERATE)
_MODEL = "policy"


@dataclass(frozen=True)
class Sample:
    """A sampled reply.

    Attributes:
        tokens: including the stop token.
        finish_reason: "stop", or "length" if truncated.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass(frozen=True)
class _Answered:
    number: int
    prompt: list[int]
    sample: Sample
    message: Message


class Endpoint:
    """Request handler of one episode.

    Args:
        sample: (prompt tokens, limit of reply tokens) -> reply.

    Attributes:
        refusal: the error if a request had tools and the chat template omits tools or calls cannot be parsed;
            else `None`.
    """

    def __init__(
        self,
        setup: Setup,
        tokenizer: Tokenizer,
        opening: Opening,
        sample: Callable[[list[int], int | None], Sample],
    ) -> None:
        self._setup, self._tokenizer, self._sample = setup, tokenizer, sample
        self._conversations, self._lock = Conversations(tokenizer, setup, opening), threading.Lock()
        self._answered: dict[str, _Answered] = {}
        self.refusal: UserError | None = None

    def list_models(self) -> dict[str, Any]:
        """Return the response body of /v1/models."""
        model = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "megatron_rl"}
        return {"object": "list", "data": [model | {"max_model_len": self._setup.context_length}]}

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the response body, without streaming (BadRequest if unsupported)."""
        key = path + json.dumps({k: v for k, v in body.items() if not k.startswith("stream")}, sort_keys=True)
        with self._lock:
            if (found := self._answered.get(key)) is None:
                found = self._answered[key] = self._ask(path, body)
        usage = {"prompt_tokens": len(found.prompt), "completion_tokens": len(found.sample.tokens)}
        usage["total_tokens"] = sum(usage.values())
        return {
            "id": f"{path.rpartition('/')[2]}-{found.number}",
            "created": 0,
            "model": body.get("model") or _MODEL,
            "usage": usage,
            **self._write(path, body, found),
        }

    def close(self) -> None:
        """Finish the request in progress, and block later ones."""
        self._lock.acquire()

    def _ask(self, path: str, body: dict[str, Any]) -> _Answered:
        temperature = self._setup.temperature
        tools: list[Any] = []
        try:
            if path == _CHAT:
                messages, tools = read_chat(body, temperature)
                if tools:
                    self._require_tools()
                context = self._conversations.show_chat(messages, tools)
            elif path == _TEXT and isinstance(prompt := read_text(body, temperature), str):
                context = self._conversations.show_text(prompt)
            else:
                tokens = prompt if path == _TEXT else read_generate(body, temperature, self._setup.stop_token_ids)
                context = Context(tokens, "")
        except UserError as error:
            raise BadRequest(error.found) from error
        if unknown := [token for token in context.tokens if token >= self._tokenizer.vocab_size]:
            raise BadRequest(f"{unknown[0]} is no token of the policy's vocabulary of {self._tokenizer.vocab_size}")
        sample = self._sample(context.tokens, read_limit(body))
        message = self._read(sample, len(self._answered), tools)
        if context.name:
            self._conversations.note(context, sample.tokens, message)
        return _Answered(len(self._answered), context.tokens, sample, message)

    def _require_tools(self) -> None:
        """Refuse a request with tools (BadRequest) if the template omits tools or their calls cannot be parsed."""
        source, options = "the tools of a request to the endpoint (agents.program)", self._setup.options
        try:
            require_shown(shows_tools(self._tokenizer, options), source)
            require_format(self._setup.tool_format, f"agents.tool_format = auto, and {source}")
        except UserError as error:
            self.refusal = error
            raise BadRequest(f"{error.found}; expected: {error.expected}; {error.hint}", "tools") from error

    def _read(self, sample: Sample, number: int, tools: list[Any]) -> Message:
        text, found = read_reply(self._tokenizer, self._setup.tool_format, sample.tokens, tools)
        calls = [call for call in found if call.arguments is not None] if tools else []
        if not calls:
            return {"role": "assistant", "content": self._tokenizer.decode(sample.tokens)}
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        return {
            "role": "assistant",
            "content": text,
            "tool_calls": [
                {"id": f"{number:05d}{i:04d}", "type": "function", "function": function}
                for i, function in enumerate(functions)
            ],
        }

    def _write(self, path: str, body: Mapping[str, Any], found: _Answered) -> dict[str, Any]:
        sample = found.sample
        choice: dict[str, Any] = {"index": 0, "finish_reason": sample.finish_reason, "logprobs": None}
        if path == _GENERATE or body.get("return_token_ids"):
            choice["token_ids"] = sample.tokens
        if path == _GENERATE:
            names = [f"token_id:{token}" for token in sample.tokens]
            return {"choices": [choice | {"logprobs": _write_logprobs(names, sample)}]}
        shown = {"prompt_token_ids": found.prompt} if body.get("return_token_ids") else {}
        if path == _TEXT:
            return {"object": "text_completion", "choices": [choice | {"text": found.message["content"]}], **shown}
        if body.get("logprobs"):
            choice["logprobs"] = _write_logprobs([self._tokenizer.decode([token]) for token in sample.tokens], sample)
        message = {**found.message, "refusal": None}
        if calls := found.message.get("tool_calls"):
            choice["finish_reason"] = "tool_calls"
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in calls
            ]
            message["content"] = message["content"] or None
        return {"object": "chat.completion", "choices": [choice | {"message": message}], **shown}


def _write_logprobs(names: Iterable[str], sample: Sample) -> dict[str, Any]:
    return {
        "content": [
            {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}
            for name, logprob in zip(names, sample.logprobs, strict=True)
        ]
    }


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


_LARGEST_BODY = 32 << 20  # bytes
_LONGEST_MESSAGE = 1000  # characters


class EndpointServer(ThreadingHTTPServer):
    """A server for one endpoint, with a thread per connection.

    Attributes:
        token: bearer token that requests must carry.
        url: base URL, without /v1.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint, self.token = endpoint, secrets.token_urlsafe(16)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # one connection for many requests
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body in one packet

    def do_GET(self) -> None:
        """Answer /v1/models with the list of models, and a path below it with the only model."""
        path = self.path.partition("?")[0]
        if self._read_body() is None:
            return
        models = self._served.endpoint.list_models()
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
        if path not in PATHS:
            self._refuse(404, f"there is no {path} here")
            return
        try:
            request = read_json(body)
            if not isinstance(request, dict):
                raise BadRequest("the body is no object")
            is_streamed, with_usage = read_stream(request)
            answer = self._served.endpoint.answer(path, request)
        except BadRequest as error:
            self._refuse(400, str(error), error.field)
            return
        except RecursionError:
            self._refuse(400, "the body is nested too deeply")
            return
        except Exception as error:  # the program receives the message of any error
            self._refuse(500, f"{type(error).__name__}: {error}")
            return
        if is_streamed:
            lines = [json.dumps(chunk) for chunk in split_into_chunks(answer, with_usage)]
            self._write("".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]), "text/event-stream")
        else:
            self._send(200, answer)

    @property
    def _served(self) -> EndpointServer:
        return cast(EndpointServer, self.server)

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
        given, expected = self.headers.get("Authorization") or "", f"Bearer {self._served.token}"
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
        self._send(
            status, {"error": {"message": message[:_LONGEST_MESSAGE], "type": kind, "param": field, "code": None}}
        )

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
