# SPDX-License-Identifier: Apache-2.0
"""The lines of rollouts/step_<N>.jsonl: what stands in a row for each token of a response."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.observability.durable import replace_text
from megatron_rl.observability.metrics import ROLLOUTS

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MOST_PARTS = 8  # tokens that one character is waited for; it has at most four bytes


class TokenTexts:
    """The text of each token of a response; joined they are the response (behind sentencepiece's leading space).

    A token's text is what it adds behind another token: alone, some tokenizers drop its leading space. It is decoded
    once per id. A character that is spread over several tokens stands at the last of them. Special tokens have no text.

    Args:
        decode: token ids -> text, without special tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}
        self._anchor: list[int] = []  # a token to decode others behind; none was seen yet
        self._anchor_text = ""

    def __call__(self, tokens: Sequence[int] | np.ndarray) -> list[str]:
        """Texts of the tokens [s]."""
        texts: list[str] = []
        parts: list[int] = []
        if not self._anchor:
            self._find_anchor(tokens)
        for token in map(int, tokens):
            text = self._text_of(token)
            if _BROKEN not in text:
                if parts:  # a character that never came to its end
                    texts[-1] = self._decode(parts)
                    parts = []
                texts.append(text)
                continue
            parts.append(token)
            joined = self._decode(parts)
            is_whole = _BROKEN not in joined or len(parts) == _MOST_PARTS
            texts.append(joined if is_whole else "")
            parts = [] if is_whole else parts
        if parts:
            texts[-1] = self._decode(parts)
        return texts

    def _find_anchor(self, tokens: Sequence[int] | np.ndarray) -> None:
        for token in map(int, tokens):
            text = self._decode([token])
            if text.strip() and _BROKEN not in text:
                self._anchor, self._anchor_text = [token], text
                self._known.clear()
                return

    def _text_of(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([*self._anchor, token])[len(self._anchor_text) :]
        return self._known[token]


def token_fields(num_tokens: int, values: Mapping[str, np.ndarray]) -> dict[str, list[float | None]]:
    """Per-token values as a row holds them: one entry per response token, null where there is none.

    Args:
        num_tokens: of the response.
        values: name -> [k] of its last k tokens, those in the loss; NaN where there is none. A name without any number
            is left out.
    """
    return {
        name: [None] * (num_tokens - len(column)) + as_numbers(column)
        for name, column in values.items()
        if np.isfinite(column).any()
    }


def as_numbers(values: np.ndarray, decimals: int = 6) -> list[float | None]:
    """Rounded numbers as JSON can hold them: null for what is not finite."""
    rounded = np.round(np.asarray(values, np.float64), decimals)
    if np.isfinite(rounded).all():
        return rounded.tolist()
    return [x if np.isfinite(x) else None for x in rounded.tolist()]


def write_rows(run_dir: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rollouts to `<run_dir>/rollouts/step_<N>.jsonl`, one JSON object per line."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (run_dir / ROLLOUTS).mkdir(parents=True, exist_ok=True)
    # Half of a character, which an engine or a reward may return, becomes its escape in JSON.
    replace_text(run_dir / ROLLOUTS / f"step_{step}.jsonl", "".join(lines), errors="backslashreplace")
