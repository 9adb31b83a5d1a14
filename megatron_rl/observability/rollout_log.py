# SPDX-License-Identifier: Apache-2.0
"""Rows of rollouts/step_<N>.jsonl, with texts and values of each response token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.observability.durable import replace_text
from megatron_rl.observability.metrics import ROLLOUTS

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MOST_PARTS = 8  # tokens of one character, which has at most four bytes


class TokenTexts:
    """Decoder of single tokens; the joined texts are the response (after sentencepiece's leading space).

    A token is decoded behind another token, because some tokenizers drop the leading space of a text. A character of
    several tokens belongs to the last of them.

    Args:
        decode: token ids -> text, without special tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}
        self._anchor: list[int] = []  # the token in front of every decoded one, once found
        self._anchor_text = ""

    def __call__(self, tokens: Sequence[int] | np.ndarray) -> list[str]:
        """Return the texts of tokens [s]."""
        texts: list[str] = []
        parts: list[int] = []
        if not self._anchor:
            self._find_anchor(tokens)
        for token in map(int, tokens):
            text = self._text_of(token)
            if _BROKEN not in text:
                if parts:  # an unfinished character
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
    """Return per-token values as lists of one entry per response token, null for tokens without a value.

    Args:
        num_tokens: response tokens.
        values: name -> [k] values of the last k tokens, which are in the loss; NaN is no value. Names without any value
            are left out.
    """
    return {
        name: [None] * (num_tokens - len(column)) + as_numbers(column)
        for name, column in values.items()
        if np.isfinite(column).any()
    }


def as_numbers(values: np.ndarray, decimals: int = 6) -> list[float | None]:
    """Return rounded numbers for JSON, null for non-finite ones."""
    rounded = np.round(np.asarray(values, np.float64), decimals)
    if np.isfinite(rounded).all():
        return rounded.tolist()
    return [x if np.isfinite(x) else None for x in rounded.tolist()]


def write_rows(run_dir: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rollouts to `<run_dir>/rollouts/step_<N>.jsonl`, one JSON object per line."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (run_dir / ROLLOUTS).mkdir(parents=True, exist_ok=True)
    # A lone surrogate, which an engine or a reward may return, becomes its JSON escape.
    replace_text(run_dir / ROLLOUTS / f"step_{step}.jsonl", "".join(lines), errors="backslashreplace")
