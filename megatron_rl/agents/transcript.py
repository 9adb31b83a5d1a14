# SPDX-License-Identifier: Apache-2.0
"""Messages to exact tokens: what was sampled stays as it is and is never encoded again.

Only what is new is rendered: the template is applied to the task's messages, a placeholder for the reply, and the new
messages, and what it writes behind the placeholder is encoded alone.

    prompt      <|im_start|>user\nWhat is 12 * 34?<|im_end|>\n<|im_start|>assistant\n
    sampled     <tool_call> ... </tool_call><|im_end|>
    tail        \n<|im_start|>user\n<tool_response>\n408 ... <|im_end|>\n<|im_start|>assistant\n
    sampled     408<|im_end|>
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.data.marks import remove_guards
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.types import UserError

Message = dict[str, Any]

_PLACEHOLDER = "placeholderofthereply"


@dataclass(frozen=True)
class Tail:
    """What the next request has behind the tokens so far.

    Attributes:
        tokens: that nobody sampled.
        is_fork: they are a context of their own, from its beginning, and follow nothing.
    """

    tokens: list[int]
    is_fork: bool = False


class Transcript(Protocol):
    """One conversation, told of each reply and of what follows it."""

    def begin(self, messages: Sequence[Message]) -> Tail:
        """What stands between the task's prompt and the first reply; `messages` follow the task's own."""
        ...

    def extend(self, reply: Sequence[int], messages: Sequence[Message]) -> Tail:
        """What stands between a reply and the next one.

        Args:
            reply: the sampled tokens, the stop token included.
            messages: that answer it.
        """
        ...


class TextTranscript:
    """For a task whose prompt is plain text: contents of messages follow the replies; none becomes a special token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def begin(self, messages: Sequence[Message]) -> Tail:
        """See `Transcript.begin`."""
        return self.extend([], messages)

    def extend(self, reply: Sequence[int], messages: Sequence[Message]) -> Tail:
        """See `Transcript.extend`."""
        return Tail(self._tokenizer.encode_content("".join(message["content"] for message in messages)))


class ChatTranscript:
    """For a task of chat messages.

    Args:
        tokenizer: with the template.
        messages: of the task.
        options: of the template; the tools are one.
        stop_token_ids: a reply that ends with one of them is closed, and the template's own closer is left out; a
            reply that was cut gets it.
        follows_template: where the template renders the conversation so far in another way than it was sampled (as
            those do that strip thoughts), the next request is that rendering: a fork. Else nothing is ever rewritten.
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
        self._messages = list(messages)  # of the whole conversation
        # The messages that the policy was shown last.
        self._text = remove_guards(self._render(self._task)) if follows_template else ""

    def begin(self, messages: Sequence[Message]) -> Tail:
        """See `Transcript.begin`."""
        if not messages:
            return Tail([])
        self._task += messages
        self._messages += messages
        whole = self._render(self._task)
        self._text = remove_guards(whole)
        return Tail(self._tokenizer.encode_rendered(whole), is_fork=True)

    def extend(self, reply: Sequence[int], messages: Sequence[Message]) -> Tail:
        """See `Transcript.extend`.

        Raises:
            UserError: the template refuses the messages, or does not write contents as they are.
        """
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
    """Return the text of the template behind a reply and its answers, up to the next reply, with guards.

    Raises:
        UserError: the template refuses the messages, or does not write contents as they are.
    """
    history = [*task, {"role": "assistant", "content": _PLACEHOLDER}, *messages]
    text = tokenizer.render(history, **options)
    _, found, tail = text.partition(_PLACEHOLDER)
    if not found:
        raise UserError(
            "the chat template does not write what the assistant has said",
            source="model.tokenizer (default: model.path)",
            expected="a template with the content of each message in it",
            hint="use the template of a chat model",
        )
    return tail


def rewrites_history(tokenizer: Tokenizer, options: Mapping[str, Any]) -> bool:
    """Whether the template renders a reply with thoughts, once it is answered, in another way than it was sampled."""
    question = [{"role": "user", "content": "question"}]
    shown = tokenizer.apply_chat_template(question, **options)
    said = "thoughts\n</think>\n\nanswer"
    if not shown.rstrip().endswith("<think>"):
        said = f"<think>\n{said}"
    history = [*question, {"role": "assistant", "content": said}, {"role": "user", "content": "further"}]
    return not tokenizer.apply_chat_template(history, **options).startswith(shown + said)
