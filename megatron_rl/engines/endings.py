# SPDX-License-Identifier: Apache-2.0
"""Stop strings, the ends that are found in the text of a response.

The token that completes a stop string ends the response; all its tokens are trained on, and rewards read the text
before the string. Special tokens and incomplete UTF-8 characters decode to no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MORE_TOKENS = 8  # special tokens, and the first token, whose leading space some tokenizers drop


class StopStrings:
    """A detector of stop strings.

    Args:
        strings: at least one, all non-empty.
        decode: token ids -> text.
    """

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
        """Return the start (character index) of the stop string that the last token completes, or `None`.

        Of several completed strings, the first to end counts.
        """
        before, text = len(self._decode(tokens[:-1]).rstrip(_BROKEN)), self._decode(tokens)
        starts = {string: text.find(string, max(0, before - len(string) + 1)) for string in self._strings}
        found = [string for string, start in starts.items() if start >= 0]
        return starts[min(found, key=lambda string: starts[string] + len(string))] if found else None
