# SPDX-License-Identifier: Apache-2.0
"""The rows of packed batches, filled sequence by sequence; what a sequence shares with the one before is not repeated.

Tokens behind a prompt have a row each, since their losses differ; what several sequences share is computed once.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.parallel.kept_sets import PackedKeptSets
from megatron_rl.types import Branch, KeptSets


class Rows:
    """Rows one behind the other, and the current microbatch's.

    Attributes:
        lengths: of the microbatch's segments.
        paths: of each, the rows of its prefix and then its own, counted in rows that the model computes.
        num_tokens, num_computed: rows of the microbatch, and how many of them the model computes.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.paths: list[np.ndarray] = []
        self.num_tokens = self.num_computed = self._total = 0
        self._last, self._path = np.empty(0, np.int32), np.empty(0, np.int64)  # tokens and rows of the last sequence
        integers = np.empty(0, np.int64)
        self._pieces = [(integers, integers, integers, np.empty(0, bool), integers, np.empty(0, np.float32))]
        self._kept: list[KeptSets] = []
        self._has_kept = False
        self._own: list[np.ndarray] = []
        self._instead: list[tuple[np.ndarray, np.ndarray]] = []

    def begin_microbatch(self) -> int:
        """Forget the segments; returns the row it starts at."""
        self.lengths, self.paths, self._own, self._instead = [], [], [], []
        self._total += self.num_tokens
        self.num_tokens = self.num_computed = 0
        return self._total

    def append(self, sequence: Branch, index: int, num_shared: int) -> None:
        """Sequence `index`, which begins with so many tokens of the one before.

        What is shared of its prompt has no row; the other rows are computed from the first token on that is not shared.
        """
        same = np.array_equal(sequence.tokens[:num_shared], self._last[:num_shared])
        assert same, "sequences have in common what they share"
        length, skipped = len(sequence.tokens), min(num_shared, sequence.num_prompt_tokens)
        positions = np.arange(skipped, length)
        rows, own, repeated = positions + (self.num_tokens - skipped), length - num_shared, num_shared - skipped
        path = np.concatenate([self._path[:num_shared], np.arange(self.num_computed, self.num_computed + own)])
        mask = sequence.sampled[skipped:] & (positions > 0)
        self._pieces.append(
            (
                sequence.tokens[skipped:],
                positions,
                path[np.maximum(positions - 1, 0)],
                mask,
                np.full(len(positions), index),
                sequence.logprobs[skipped:],
            )
        )
        kept = sequence.kept or KeptSets.whole(length)
        self._kept.append(KeptSets(kept.ids, kept.counts[skipped:]))  # a prompt has no ids
        self._has_kept |= sequence.kept is not None
        if own:
            self.lengths.append(own)
            self.paths.append(path)
            self._own.append(rows[repeated:])
        if (learned := np.flatnonzero(mask[:repeated])).size:
            self._instead.append((path[skipped + learned], rows[learned]))
        self._last, self._path = sequence.tokens, path
        self.num_tokens += len(positions)
        self.num_computed += own

    def pad(self, length: int, max_seqlen: int | None = None) -> None:
        """Segments of nothing, of at most `max_seqlen` tokens, until the microbatch computes `length` rows."""
        while (missing := length - self.num_computed) > 0:
            count = min(missing, max_seqlen or missing)
            self.append(Branch.of_response(np.zeros(count, np.int32), count), -1, 0)

    def find_computed(self) -> np.ndarray | None:
        """See `MicrobatchSlice.computed`; of the current microbatch, [m] int64 or None."""
        if self.num_computed == self.num_tokens:
            return None
        computed = np.concatenate(self._own)
        for rows, others in self._instead:
            computed[rows] = others
        return computed

    def pack_kept(self, device: torch.device) -> PackedKeptSets | None:
        """Of all rows; None where no sequence has any."""
        return PackedKeptSets.pack(self._kept, device) if self._has_kept else None

    def build_columns(self) -> dict[str, np.ndarray]:
        """Columns [t] of all rows."""
        names = ("tokens", "positions", "predecessors", "mask", "ids", "logprobs")
        columns = dict(zip(names, map(np.concatenate, zip(*self._pieces, strict=True)), strict=True))
        return columns | {"logprobs": columns["logprobs"].astype(np.float32, copy=False)}
