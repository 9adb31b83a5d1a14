# SPDX-License-Identifier: Apache-2.0
"""Chat messages of a row: checked, and shortened so that the chat template around them stays whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from megatron_rl.data.marks import remove_guards
from megatron_rl.data.rows import Row, wrong_type
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.types import UserError

T = TypeVar("T")
_EXPECTED = (
    'chat messages {"role": text, "content": text}; a content may be a list of parts {"type": "text", "text": text}'
)


def read_messages(value: Sequence[Any], row: Row, column: str) -> list[dict[str, Any]]:
    """The messages with their contents as texts; text parts are joined.

    Raises:
        UserError: no messages, or one that is none or has a part that is no text.
    """
    if not value:
        raise wrong_type(column, value, row.location, "at least one chat message")
    messages = []
    for message in value:
        content = _join_parts(message.get("content")) if isinstance(message, dict) else None
        if content is None or not isinstance(message.get("role"), str):
            raise wrong_type(column, message, row.location, _EXPECTED)
        messages.append({**message, "content": content})
    return messages


def read_tools(row: Row) -> list[Any]:
    """The column `tools`, where a row has it: a list of tools in the form of OpenAI's API, or that as JSON text.

    Raises:
        UserError: it is something else.
    """
    value = row.columns.get("tools")
    tools = value
    if isinstance(value, str):
        try:
            tools = json.loads(value)
        except ValueError:
            tools = value
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise wrong_type("tools", value, row.location, "a list of objects, one per tool, or that as JSON text")
    return tools or []


def _join_parts(content: Any) -> str | None:
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    strings = [text for text in texts if isinstance(text, str)]
    return "".join(strings) if len(strings) == len(texts) else None


def shorten_messages(
    messages: list[dict[str, Any]],
    limit: int,
    policy: str,
    tokenizer: Tokenizer,
    options: Mapping[str, Any],
    place: str,
) -> tuple[str, list[int]]:
    """Cut the longest contents to one length, so that the conversation with its template has at most `limit` tokens.

    Args:
        messages: contents are texts.
        limit: tokens.
        policy: see `keep_tokens`.
        tokenizer: of the policy model.
        options: of the chat template.
        place: file and line, for the error.

    Returns:
        The text and its tokens.

    Raises:
        UserError: the template alone is longer.
    """
    contents = [tokenizer.encode_content(message["content"]) for message in messages]
    longest = max(map(len, contents))
    while True:
        rendered = tokenizer.render(messages, **options)
        tokens = tokenizer.encode_rendered(rendered)
        if len(tokens) <= limit:
            return remove_guards(rendered), tokens
        if not longest:
            raise UserError(
                f"the chat template alone has {len(tokens)} tokens",
                source=place,
                expected=f"fewer than data.max_prompt_length = {limit}",
                hint="raise data.max_prompt_length",
            )
        # A cut may split or join tokens at its edge: what is still too long is cut off in the next round.
        wanted = sum(min(len(content), longest) for content in contents) - (len(tokens) - limit)
        while longest and sum(min(len(content), longest) for content in contents) > wanted:
            longest -= 1
        messages = [
            message
            if len(content) <= longest
            else {**message, "content": tokenizer.decode(keep_tokens(content, longest, policy))}
            for message, content in zip(messages, contents, strict=True)
        ]


def keep_tokens(tokens: list[T], limit: int, policy: str) -> list[T]:
    """The last `limit` tokens ("truncate"), the first ("truncate_right"), or half from each end ("truncate_middle")."""
    first = {"truncate": 0, "truncate_right": limit, "truncate_middle": limit // 2}[policy]
    return tokens[:first] + tokens[len(tokens) - (limit - first) :]
