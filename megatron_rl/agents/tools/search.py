# SPDX-License-Identifier: Apache-2.0
"""The tool `search`: passages of a local corpus by BM25 (Robertson and Zaragoza 2009).

The score of a passage d for a query is the sum over its words w of

    log(1 + (N - n_w + 0.5) / (n_w + 0.5)) * f * (k1 + 1) / (f + k1 * (1 - b + b * |d| / mean |d|))

with N passages, of which n_w contain w, and f occurrences of w in d.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.agents.tools.tool import Tool, describe_function
from megatron_rl.data.rows import read_rows
from megatron_rl.types import UserError

_K1, _B = 1.2, 0.75
_WORD = re.compile(r"\w+")
_MOST = 10  # results
_LONGEST_PASSAGE = 2000  # characters


class Bm25:
    """A BM25 index of texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(_WORD.findall(text.lower())) for text in texts]
        lengths = np.array([max(count.total(), 1) for count in counts], np.float32)
        self._penalties = _K1 * (1 - _B + _B * lengths / lengths.mean())
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for index, count in enumerate(counts):
            for word, times in count.items():
                found[word].append((index, times))
        self._found = {word: np.array(pairs, np.int32).T for word, pairs in found.items()}  # [2, n] text index, count

    def find(self, query: str, most: int) -> list[int]:
        """Return indices of the best texts, best first, that contain a word of the query."""
        total = len(self._penalties)
        scores = np.zeros(total, np.float64)
        for word in _WORD.findall(query.lower()):
            if word in self._found:
                places, times = self._found[word]
                weight = math.log(1 + (total - len(places) + 0.5) / (len(places) + 0.5))
                scores[places] += weight * times * (_K1 + 1) / (times + self._penalties[places])
        best = np.argsort(-scores, kind="stable")[:most]
        return [int(place) for place in best if scores[place] > 0]


def search(query: str, num_results: int = 3) -> str:
    """Find passages about a question in the corpus."""
    raise NotImplementedError  # only the tool's spec is taken from here; `find_search` builds the function


def find_search(corpus: str) -> Tool:
    """Return the tool for a corpus file with columns `text` and optionally `title` (UserError if missing)."""
    if not Path(corpus).is_file():
        raise UserError(
            f"{corpus or 'no file'}: there is no such corpus",
            source=f"agents.tools = search:{corpus}",
            expected="a JSONL or parquet file with a column text",
            hint="write one passage per row",
        )

    def load() -> Any:
        rows = [row.columns | {"text": row.scalar_text("text")} for row in read_rows([corpus])]
        passages = [f"{row['title']}\n{row['text']}" if row.get("title") else row["text"] for row in rows]
        index = Bm25(passages)

        def find(query: str, num_results: int = 3) -> str:
            places = index.find(query, max(1, min(int(num_results), _MOST)))
            texts = [f"[{i}] {passages[place][:_LONGEST_PASSAGE]}" for i, place in enumerate(places, start=1)]
            return "\n\n".join(texts) or "nothing found"

        return find

    return Tool(describe_function(search), load)
