# SPDX-License-Identifier: Apache-2.0
"""Stop strings: a response ends with the token that completes one of them.

What was sampled stays: all tokens of the response are learned from. Rewards read the text before the string. Special
tokens have no text, and a character whose bytes are not all there is none yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MORE_TOKENS = 8  # special ones, and the first, of which some tokenizers drop a leading space


class StopStrings:
    """Looks for the strings at the end of responses.

    Args:
        strings: not empty; none of them is.
        decode: token ids -> text.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._strings, self._decode = tuple(strings), decode
        self._most_tokens = max(len(text.encode()) for text in strings) + _MORE_TOKENS

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the last one of these sampled tokens completes a string; only the last few are looked at."""
        return bool(len(tokens)) and self._find([*map(int, tokens[-self._most_tokens :])]) is not None

    def read(self, tokens: Sequence[int]) -> str:
        """The text of a response, up to the string that its last token completes."""
        tokens = [*map(int, tokens)]
        end = self._find(tokens) if self.ends(tokens) else None
        return self._decode(tokens)[:end]

    def _find(self, tokens: list[int]) -> int | None:
        """Where the string begins that the last token completes; of several, the one that is complete first."""
        before, text = len(self._decode(tokens[:-1]).rstrip(_BROKEN)), self._decode(tokens)
        starts = {string: text.find(string, max(0, before - len(string) + 1)) for string in self._strings}
        found = [string for string, start in starts.items() if start >= 0]
        return starts[min(found, key=lambda string: starts[string] + len(string))] if found else None
