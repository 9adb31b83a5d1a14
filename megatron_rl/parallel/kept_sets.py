# SPDX-License-Identifier: Apache-2.0
"""Softmax over a part of the vocabulary per row: the tokens kept by truncated sampling (top-p etc.)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from megatron_rl.parallel.vocab_parallel import VocabShard
from megatron_rl.types import KeptSets

OUTSIDE = -1e30  # logit of probability 0; finite, so that differences and products with 0 are finite


@dataclass(frozen=True)
class PackedKeptSets:
    """A set of token ids per row.

    Attributes:
        ids: [k] int32, possibly also of other rows.
        firsts: [t] int64, start of each row's set in `ids`.
        counts: [t] int64, set sizes; 0 means the whole vocabulary.
    """

    ids: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def pack(cls, parts: Sequence[KeptSets], device: torch.device) -> PackedKeptSets:
        """Concatenate the sets of several parts."""
        ids = np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)])
        counts = np.concatenate([np.empty(0, np.int32), *(part.counts for part in parts)]).astype(np.int64)
        firsts = np.cumsum(counts) - counts
        return cls(*(torch.from_numpy(array).to(device) for array in (ids, firsts, counts)))

    def __getitem__(self, rows: slice | torch.Tensor) -> PackedKeptSets:
        """Select rows."""
        return PackedKeptSets(self.ids, self.firsts[rows], self.counts[rows])

    def pad(self, count: int) -> PackedKeptSets:
        """Append `count` rows with the whole vocabulary."""
        return PackedKeptSets(self.ids, F.pad(self.firsts, (0, count)), F.pad(self.counts, (0, count)))

    def mask(self, z: torch.Tensor, shard: VocabShard) -> torch.Tensor:
        """Return the logits [t, width] of a shard in a new tensor, with `OUTSIDE` outside the sets."""
        rows = torch.repeat_interleave(self.counts)  # [k] row of each id
        begins = self.counts.cumsum(0) - self.counts
        places = torch.arange(len(rows), device=rows.device) + (self.firsts - begins)[rows]
        columns = self.ids[places].long() - shard.start
        is_mine = (columns >= 0) & (columns < shard.width)
        rows, columns = rows[is_mine], columns[is_mine]
        masked = torch.where((self.counts == 0)[:, None], z, OUTSIDE)
        masked[rows, columns] = z[rows, columns]
        return masked
