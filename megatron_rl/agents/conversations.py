# SPDX-License-Identifier: Apache-2.0
"""The requests of a program to exact tokens: what it repeats of earlier replies is found, and never encoded again.

A program sends the whole conversation with each request. The longest part of it that ends with a reply of the policy is
looked up; what follows is rendered alone (see `transcript`). A request whose history differs from all that was said is
rendered from its beginning: the episode forks there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from megatron_rl.agents.episode import Opening, Setup
from megatron_rl.agents.transcript import ChatTranscript, Message
from megatron_rl.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Context:
    """What a request shows the policy.

    Attributes:
        tokens: of it.
        name: of the conversation so far; a digest for a chat, the text itself for plain text.
        transcript: of the chat; None: plain text or tokens.
    """

    tokens: list[int]
    name: str
    transcript: ChatTranscript | None = None


@dataclass(frozen=True)
class _Said:
    """A conversation that ends with a reply."""

    context: Context
    reply: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.context.tokens + self.reply


class Conversations:
    """All that was said in one episode.

    Args:
        tokenizer: of the policy.
        setup: of the run.
        opening: of the episode; a request that shows the task as the data file does has its tokens.
    """

    def __init__(self, tokenizer: Tokenizer, setup: Setup, opening: Opening) -> None:
        self._tokenizer, self._setup, self._opening = tokenizer, setup, opening
        self._chats: dict[str, _Said] = {}
        self._texts: dict[str, _Said] = {}

    def show_chat(self, messages: Sequence[Message], tools: list[Any]) -> Context:
        """The tokens of a chat up to where the policy speaks.

        Args:
            messages: with contents that are texts, and the arguments of tool calls as objects.
            tools: in the form of OpenAI's API.

        Raises:
            UserError: the chat template refuses them.
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
        """The tokens of plain text, which a program has rendered by itself: it may have the text of special tokens.

        An earlier prompt with its reply, if the text begins with one, stays as it was.
        """
        known = max((key for key in self._texts if text.startswith(key)), key=len, default=None)
        if known is not None:
            return Context(self._texts[known].tokens + self._tokenizer.encode(text[len(known) :]), text)
        is_task = text == self._opening.task.prompt
        return Context(self._opening.tokens if is_task else self._tokenizer.encode(text), text)

    def note(self, context: Context, reply: list[int], message: Message) -> None:
        """The policy has replied.

        Args:
            context: of the request.
            reply: the sampled tokens.
            message: as the program is told it, and will repeat it.
        """
        if context.transcript is None:
            self._texts[context.name + message["content"]] = _Said(context, reply)
        else:
            self._chats[_digest(context.name, message)] = _Said(context, reply)


def _name_prefixes(messages: Sequence[Message], tools: list[Any]) -> list[str]:
    """A digest of the tools and the first i messages at place i."""
    names = [json.dumps(tools, sort_keys=True)]
    for message in messages:
        names.append(_digest(names[-1], message))
    return names


def _digest(name: str, message: Message) -> str:
    """Of a conversation and one more message.

    What programs change in a reply when they repeat it does not count: white space, and how arguments are written.
    """
    text, calls = message.get("content") or "", message.get("tool_calls") or []
    said = [
        message["role"],
        "".join(text.split()) if message["role"] == "assistant" else text,
        [[call["function"]["name"], call["function"]["arguments"]] for call in calls],
    ]
    return blake2b((name + json.dumps(said, sort_keys=True)).encode(), digest_size=16).hexdigest()
