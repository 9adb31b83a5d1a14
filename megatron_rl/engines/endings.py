# SPDX-License-Identifier: Apache-2.0
"""Ends that are found in the text of a response: stop strings, and the tags around thoughts.

The token that completes a stop string ends the response; all its tokens are trained on, and rewards read the text
before the string. Special tokens and incomplete UTF-8 characters decode to no text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.data.tokenizer import Tokenizer


_CLOSING_TAG = re.compile(r"</\w+>|\[/\w+\]")


class Thoughts:
    """The tags around a thought, and the tokens that close it.

    Args:
        closing: text with the closing tag, such as </think>.

    Raises:
        UserError: no closing tag, or the tokenizer cannot encode it.
    """

    def __init__(self, closing: str, tokenizer: Tokenizer) -> None:
        found = _CLOSING_TAG.search(closing)
        tag = found.group() if found else ""
        self._tags, self._tokenizer = (tag.replace("/", ""), tag), tokenizer
        self.closing = np.array(tokenizer.encode(closing), np.int32)  # [s] int32 tokens of that text
        if not tag or tag not in self._read(self.closing.tolist()):
            raise UserError(
                f"the text {closing!r} ends no thought: its tokens are {self.closing.tolist()}",
                source="rollout.thinking_end",
                expected="a text with a closing tag, such as </think> or [/THINK], that the tokenizer writes and reads",
                hint="take the tag from the model's chat template, or set rollout.thinking_budget=null",
            )

    def are_open(self, tokens: Sequence[int]) -> bool:
        """Return whether prompt and response end inside a thought."""
        text = self._read(tokens)
        opening, closing = map(text.rfind, self._tags)
        return opening > closing

    def _read(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, keep=self._tags)


_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MORE_TOKENS = 8  # special tokens, and the first token, whose leading space some tokenizers drop


class StopStrings:
    """A detector of stop strings, at least one, all non-empty; `decode`: token ids -> text."""

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._strings, self._decode = tuple(strings), decode
        self._most_tokens = max(len(text.encode()) for text in strings) + _MORE_TOKENS

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string."""
        return bool(len(tokens)) and self._find([*map(int, tokens[-self._most_tokens :])]) is not None

    def read(self, tokens: Sequence[int]) -> str:
        """Return the text of a response, without a stop string that its last token completes."""
        tokens = [*map(int, tokens)]
        end = self._find(tokens) if self.ends(tokens) else None
        return self._decode(tokens)[:end]

    def _find(self, tokens: list[int]) -> int | None:
        """Return the start of the stop string that the last token completes, the first to end, or `None`."""
        before, text = len(self._decode(tokens[:-1]).rstrip(_BROKEN)), self._decode(tokens)
        starts = {string: text.find(string, max(0, before - len(string) + 1)) for string in self._strings}
        found = [string for string, start in starts.items() if start >= 0]
        return starts[min(found, key=lambda string: starts[string] + len(string))] if found else None
