# SPDX-License-Identifier: Apache-2.0
"""Reads the chat messages of a row, and shortens them without cutting the chat template around them."""

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
    """Return the messages with text contents; text parts are joined (UserError for malformed or no messages)."""
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
    """Return the column `tools`, if present: a list in OpenAI format, or its JSON text (UserError otherwise)."""
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
    """Cut the longest contents to a common length, so that the conversation has at most `limit` tokens.

    Args:
        messages: with text contents.
        policy: see `keep_tokens`.
        options: template arguments.
        place: file and line, for the error.

    Returns:
        The rendered text and its tokens.

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
        # Cutting may split or merge tokens at the edge; the next iteration cuts the excess.
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
    """Keep the last `limit` tokens ("truncate"), the first ("truncate_right"), or half per end ("truncate_middle")."""
    first = {"truncate": 0, "truncate_right": limit, "truncate_middle": limit // 2}[policy]
    return tokens[:first] + tokens[len(tokens) - (limit - first) :]
