# SPDX-License-Identifier: Apache-2.0
"""Request handling of an episode's endpoint, which speaks as OpenAI's and Anthropic's, one request (a turn) at a time.

docs/agents.md lists its routes. A repeated request (a retry) gets the first answer again. A program sends the whole
conversation each time: of the longest prefix that was seen before and ends with a reply, the tokens are reused, and
only the rest is rendered (see `transcript`).

A request to Anthropic's /v1/messages becomes the body of an equal /v1/chat/completions request: both have the same
tokens, and a conversation may continue by the other route.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from megatron_rl.agents.episode import Opening, Setup
from megatron_rl.agents.requests import (
    CHAT,
    GENERATE,
    MESSAGES,
    TEXT,
    BadRequest,
    read_chat,
    read_generate,
    read_limit,
    read_text,
)
from megatron_rl.agents.tool_formats import read_reply, require_format, require_shown, shows_tools
from megatron_rl.agents.transcript import ChatTranscript, Message
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.types import UserError

_MODEL = "policy"
# Of /v1/messages.
_AS_IN_CHATS = {"model", "max_tokens", "temperature", "top_p", "top_k", "stream", "metadata", "service_tier"}
_IGNORED = {"cache_control", "context_management", "output_config"}  # of whole requests
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


@dataclass(frozen=True)
class Context:
    """The prompt of a request."""

    tokens: list[int]
    name: str  # key of the conversation: a digest for a chat, the text itself for plain text
    transcript: ChatTranscript | None = None  # the chat so far; `None` if the request has plain text or tokens


class Conversations:
    """The conversations of one episode, keyed by content."""

    def __init__(self, tokenizer: Tokenizer, setup: Setup, opening: Opening) -> None:
        self._tokenizer, self._setup, self._opening = tokenizer, setup, opening
        self._chats: dict[str, tuple[Context, list[int]]] = {}  # prompt and reply
        self._texts: dict[str, list[int]] = {}  # tokens of prompt and reply

    def show_chat(self, messages: Sequence[Message], tools: list[Any]) -> Context:
        """Return the prompt of a chat up to the start of the next reply (UserError if the template rejects it).

        Args:
            messages: tool-call arguments are objects.
            tools: in OpenAI format.
        """
        names = _name_prefixes(messages, tools)
        for stop in range(len(messages), 0, -1):
            if said := self._chats.get(names[stop]):
                before, reply = said
                transcript = copy.copy(before.transcript)
                assert transcript is not None
                tail = transcript.extend(reply, messages[stop:])
                tokens = tail.tokens if tail.is_fork else before.tokens + reply + tail.tokens
                return Context(tokens, names[-1], transcript)
        options, task = self._setup.options | ({"tools": tools} if tools else {}), self._opening.task
        transcript = ChatTranscript(
            self._tokenizer,
            messages,
            options,
            self._setup.stop_token_ids,
            follows_template=self._setup.follows_template,
        )
        if task.messages is not None and names[-1] == _name_prefixes(task.messages, task.tools)[-1]:
            return Context(self._opening.tokens, names[-1], transcript)
        text = self._tokenizer.render([*messages], **options)
        return Context(self._tokenizer.encode_rendered(text), names[-1], transcript)

    def show_text(self, text: str) -> Context:
        """Return the prompt for plain text; an earlier prompt and reply at the text's start keep their tokens.

        The program rendered the text, so special tokens in it are recognized.
        """
        known = max((key for key in self._texts if text.startswith(key)), key=len, default=None)
        if known is not None:
            return Context(self._texts[known] + self._tokenizer.encode(text[len(known) :]), text)
        is_task = text == self._opening.task.prompt
        return Context(self._opening.tokens if is_task else self._tokenizer.encode(text), text)

    def note(self, context: Context, reply: list[int], message: Message) -> None:
        """Record a reply, so that requests that repeat it reuse its tokens.

        Args:
            message: the reply as sent to the program.
        """
        if context.transcript is None:
            self._texts[context.name + message["content"]] = context.tokens + reply
        else:
            self._chats[_digest(context.name, message)] = context, reply


def _name_prefixes(messages: Sequence[Message], tools: list[Any]) -> list[str]:
    return list(accumulate(messages, _digest, initial=json.dumps(tools, sort_keys=True)))


def _digest(name: str, message: Message) -> str:
    """Return the key of a conversation extended by a message: the hash of its key so far and the message.

    White space of replies and the formatting of arguments are ignored, because programs change them.
    """
    text, calls = message.get("content") or "", message.get("tool_calls") or []
    said = [
        message["role"],
        "".join(text.split()) if message["role"] == "assistant" else text,
        [[call["function"]["name"], call["function"]["arguments"]] for call in calls],
    ]
    return blake2b((name + json.dumps(said, sort_keys=True)).encode(), digest_size=16).hexdigest()


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
        # The error if a request had tools and the chat template omits tools or calls cannot be parsed; else `None`.
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
        sizes = len(found.prompt), len(found.sample.tokens)
        if path == MESSAGES:
            usage = dict(zip(("input_tokens", "output_tokens"), sizes, strict=True))
            head = {"id": f"msg_{found.number}", "model": body.get("model") or _MODEL, "usage": usage}
            return head | write_reply(found.message, found.sample.finish_reason)
        usage = dict(zip(("prompt_tokens", "completion_tokens"), sizes, strict=True)) | {"total_tokens": sum(sizes)}
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
            if path == MESSAGES:
                body = read_messages(body)
            if path in (CHAT, MESSAGES):
                messages, tools = read_chat(body, temperature)
                if tools:
                    self._require_tools()
                context = self._conversations.show_chat(messages, tools)
            elif path == TEXT and isinstance(prompt := read_text(body, temperature), str):
                context = self._conversations.show_text(prompt)
            else:
                tokens = prompt if path == TEXT else read_generate(body, temperature, self._setup.stop_token_ids)
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
        if path == GENERATE or body.get("return_token_ids"):
            choice["token_ids"] = sample.tokens
        if path == GENERATE:
            names = [f"token_id:{token}" for token in sample.tokens]
            return {"choices": [choice | {"logprobs": _write_logprobs(names, sample)}]}
        shown = {"prompt_token_ids": found.prompt} if body.get("return_token_ids") else {}
        if path == TEXT:
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
