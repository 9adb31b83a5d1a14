# SPDX-License-Identifier: Apache-2.0
"""Request handling of an episode's OpenAI-compatible endpoint, one request (a turn) at a time.

    GET  /v1/models
    POST /v1/chat/completions     messages and tools; streaming
    POST /v1/completions          text or tokens; streaming
    POST /inference/v1/generate   tokens in, tokens and log-probs out, as in vLLM

A repeated request (a retry) gets the first answer again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.agents.conversations import Context, Conversations
from megatron_rl.agents.episode import Setup
from megatron_rl.agents.requests import BadRequest, read_chat, read_generate, read_limit, read_text
from megatron_rl.agents.tool_formats import ToolReader, require_format, require_shown, shows_tools
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
        lock: held while a request is answered.

    Attributes:
        refusal: error of a request whose tools the run cannot show or parse.
    """

    def __init__(
        self,
        setup: Setup,
        tokenizer: Tokenizer,
        conversations: Conversations,
        sample: Callable[[list[int], int | None], Sample],
        lock: threading.Lock,
    ) -> None:
        self._setup, self._tokenizer, self._conversations = setup, tokenizer, conversations
        self._sample, self._lock, self._reader = sample, lock, ToolReader(tokenizer, setup.tool_format)
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
        """Refuse tools that the template does not show or replies cannot call (BadRequest)."""
        source, options = "the tools of a request to the endpoint (agents.program)", self._setup.options
        try:
            require_shown(shows_tools(self._tokenizer, options), source)
            require_format(self._setup.tool_format, f"agents.tool_format = auto, and {source}")
        except UserError as error:
            self.refusal = error
            raise BadRequest(f"{error.found}; expected: {error.expected}; {error.hint}", "tools") from error

    def _read(self, sample: Sample, number: int, tools: list[Any]) -> Message:
        text, found = self._reader.read(sample.tokens, tools)
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
            message["tool_calls"] = [_write_call(call) for call in calls]
            message["content"] = message["content"] or None
        return {"object": "chat.completion", "choices": [choice | {"message": message}], **shown}


def _write_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {"name": function["name"], "arguments": json.dumps(function["arguments"])}}


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
