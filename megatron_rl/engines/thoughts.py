# SPDX-License-Identifier: Apache-2.0
"""How the thoughts of a policy begin and end, by the text of its tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.data.tokenizer import Tokenizer

_CLOSING_TAG = re.compile(r"</\w+>|\[/\w+\]")


class Thoughts:
    """The tags around a thought, and the tokens that end one that takes too long.

    Args:
        closing: text with the closing tag, such as </think>; the opening one is the same without the slash.
        tokenizer: of the policy.

    Attributes:
        closing: [s] int32 tokens of that text.

    Raises:
        UserError: the text has no closing tag, or the tokenizer cannot write it.
    """

    def __init__(self, closing: str, tokenizer: Tokenizer) -> None:
        found = _CLOSING_TAG.search(closing)
        tag = found.group() if found else ""
        self._tags, self._tokenizer = (tag.replace("/", ""), tag), tokenizer
        self.closing = np.array(tokenizer.encode(closing), np.int32)
        if not tag or tag not in self._read(self.closing.tolist()):
            raise UserError(
                f"the text {closing!r} ends no thought: its tokens are {self.closing.tolist()}",
                source="rollout.thinking_end",
                expected="a text with a closing tag, such as </think> or [/THINK], that the tokenizer writes and reads",
                hint="take the tag from the model's chat template, or set rollout.thinking_budget=null",
            )

    def are_open(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens, the prompt's and the response's, end inside a thought."""
        text = self._read(tokens)
        opening, closing = map(text.rfind, self._tags)
        return opening > closing

    def _read(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, keep=self._tags)
