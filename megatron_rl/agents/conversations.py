# SPDX-License-Identifier: Apache-2.0
"""Maps a program's requests to exact tokens; earlier replies keep their sampled tokens.

A program sends the whole conversation each time. The longest prefix that was seen before and ends with a reply is
reused, and only the rest is rendered (see `transcript`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from megatron_rl.agents.episode import Opening, Setup
from megatron_rl.agents.transcript import ChatTranscript, Message
from megatron_rl.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Context:
    """The prompt of a request.

    Attributes:
        name: key of the conversation: a digest for a chat, the text itself for plain text.
        transcript: the chat so far; `None` if the request has plain text or tokens.
    """

    tokens: list[int]
    name: str
    transcript: ChatTranscript | None = None


@dataclass(frozen=True)
class _Said:
    context: Context
    reply: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.context.tokens + self.reply


class Conversations:
    """The conversations of one episode, keyed by content."""

    def __init__(self, tokenizer: Tokenizer, setup: Setup, opening: Opening) -> None:
        self._tokenizer, self._setup, self._opening = tokenizer, setup, opening
        self._chats: dict[str, _Said] = {}
        self._texts: dict[str, _Said] = {}

    def show_chat(self, messages: Sequence[Message], tools: list[Any]) -> Context:
        """Return the prompt of a chat up to the start of the next reply (UserError if the template rejects it).

        Args:
            messages: tool-call arguments are objects.
            tools: in OpenAI format.
        """
        names = _name_prefixes(messages, tools)
        for stop in range(len(messages), 0, -1):
            if said := self._chats.get(names[stop]):
                assert said.context.transcript is not None
                transcript = copy.copy(said.context.transcript)
                tail = transcript.extend(said.reply, messages[stop:])
                tokens = tail.tokens if tail.is_fork else said.tokens + tail.tokens
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
            return Context(self._texts[known].tokens + self._tokenizer.encode(text[len(known) :]), text)
        is_task = text == self._opening.task.prompt
        return Context(self._opening.tokens if is_task else self._tokenizer.encode(text), text)

    def note(self, context: Context, reply: list[int], message: Message) -> None:
        """Record a reply, so that requests that repeat it reuse its tokens.

        Args:
            message: the reply as sent to the program.
        """
        if context.transcript is None:
            self._texts[context.name + message["content"]] = _Said(context, reply)
        else:
            self._chats[_digest(context.name, message)] = _Said(context, reply)


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
