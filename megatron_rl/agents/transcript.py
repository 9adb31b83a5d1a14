# SPDX-License-Identifier: Apache-2.0
"""Turns messages into exact tokens; sampled tokens are never encoded again.

The template renders the task's messages, a placeholder for the reply, and the new messages; only the text after the
placeholder is encoded.

    prompt      <|im_start|>user\nWhat is 12 * 34?<|im_end|>\n<|im_start|>assistant\n
    sampled     <tool_call> ... </tool_call><|im_end|>
    tail        \n<|im_start|>user\n<tool_response>\n408 ... <|im_end|>\n<|im_start|>assistant\n
    sampled     408<|im_end|>
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.chats import remove_guards
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.types import UserError

Message = dict[str, Any]

_PLACEHOLDER = "placeholderofthereply"


@dataclass(frozen=True)
class Tail:
    """Tokens that the next request adds to the context, none of them sampled; if `is_fork`, a complete new context."""

    tokens: list[int]
    is_fork: bool = False


class TextTranscript:
    """A transcript of plain text; contents never become special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def begin(self, messages: Sequence[Message]) -> Tail:
        """Return the tokens of the environment's opening messages, between prompt and first reply."""
        return self.extend([], messages)

    def extend(self, reply: Sequence[int], messages: Sequence[Message]) -> Tail:
        """Return the tokens between a reply and the next one.

        Args:
            reply: sampled tokens, including the stop token.
            messages: the answer to the reply.
        """
        return Tail(self._tokenizer.encode_content("".join(message["content"] for message in messages)))


class ChatTranscript:
    """A transcript of chat messages.

    Args:
        options: template arguments, including the tools.
        stop_token_ids: after a reply that ends with one, the template's own end-of-turn token is left out; a truncated
            reply gets it.
        follows_template: replace the context by the template's rendering if that differs from the sampled text (for
            example, without thoughts). If false, the context only grows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        stop_token_ids: Collection[int],
        *,
        follows_template: bool = False,
    ) -> None:
        self._tokenizer, self._options, self._stop_token_ids = tokenizer, options, stop_token_ids
        self._task, self._follows_template = list(messages), follows_template
        self._messages = list(messages)
        # The text that the policy saw last.
        self._text = remove_guards(self._render(self._task)) if follows_template else ""

    def begin(self, messages: Sequence[Message]) -> Tail:
        """Append `messages` to the task and return its rendering as a new context; without messages, no tokens."""
        if not messages:
            return Tail([])
        self._task += messages
        self._messages += messages
        whole = self._render(self._task)
        self._text = remove_guards(whole)
        return Tail(self._tokenizer.encode_rendered(whole), is_fork=True)

    def extend(self, reply: Sequence[int], messages: Sequence[Message]) -> Tail:
        """Return the tokens between a reply and the next one, or a new context; UserError as in `render_tail`."""
        text = render_tail(self._tokenizer, self._task, messages, self._options)
        if self._follows_template:
            said = self._tokenizer.decode(reply)
            self._messages = [*self._messages, {"role": "assistant", "content": said}, *messages]
            whole = self._render(self._messages)
            shown, self._text = self._text + said, remove_guards(whole)
            if not self._text.startswith(shown):
                return Tail(self._tokenizer.encode_rendered(whole), is_fork=True)
        tokens = self._tokenizer.encode_rendered(text)
        is_closed = bool(reply) and reply[-1] in self._stop_token_ids
        return Tail(tokens[1:] if is_closed and tokens[:1] and tokens[0] in self._stop_token_ids else tokens)

    def _render(self, messages: list[Message]) -> str:
        return self._tokenizer.render(messages, **self._options)


def render_tail(
    tokenizer: Tokenizer, task: Sequence[Message], messages: Sequence[Message], options: Mapping[str, Any]
) -> str:
    """Render the template's text between a reply and the next one.

    Returns:
        The text, with guard characters (`data.chats`) in control tokens that are part of contents.

    Raises:
        UserError: the template rejects the messages, or does not render contents verbatim.
    """
    history = [*task, {"role": "assistant", "content": _PLACEHOLDER}, *messages]
    text = tokenizer.render(history, **options)
    _, found, tail = text.partition(_PLACEHOLDER)
    if not found:
        raise UserError(
            "the chat template does not render the assistant's messages",
            source="model.tokenizer (default: model.path)",
            expected="a template with the content of each message in it",
            hint="use the template of a chat model",
        )
    return tail


def rewrites_history(tokenizer: Tokenizer, options: Mapping[str, Any]) -> bool:
    """Return whether the template renders an earlier reply with thoughts differently than it was sampled."""
    question = [{"role": "user", "content": "question"}]
    shown = tokenizer.apply_chat_template(question, **options)
    said = "thoughts\n</think>\n\nanswer"
    if not shown.rstrip().endswith("<think>"):
        said = f"<think>\n{said}"
    history = [*question, {"role": "assistant", "content": said}, {"role": "user", "content": "further"}]
    return not tokenizer.apply_chat_template(history, **options).startswith(shown + said)
