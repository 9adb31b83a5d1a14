# SPDX-License-Identifier: Apache-2.0
"""The attention pattern of a packed row, as `attention.py` prepares it for a backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE = 32  # positions


@dataclass(frozen=True)
class TileBatch:
    """Tiles (blocks of 32 query positions) with the same index in their sequences, computed in one call of sdpa.

    The call has (number + 1) * 32 keys per tile and a causal mask (missing rows are fillers). As its shape depends only
    on `number`, a token has the same bits in decoding, behind a shared prompt, and in a whole sequence.

    Attributes:
        number: index of the tile in its sequence; 0 for positions 0 to 31.
        queries: [b * 32] int64, query rows of b tiles.
        first_key, last_key: [b] int64, first and last key row of each tile's sequence.
    """

    number: int
    queries: torch.Tensor
    first_key: torch.Tensor
    last_key: torch.Tensor


@dataclass(frozen=True)
class Segments:
    """Attention pattern of a packed row for one backend: segments, each with rows of queries and rows of keys.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: [num_segments + 1] int32.
        key_index: [k] int64, concatenated key rows of the segments; `None` if they are the packed rows in place.
        key_is_real: [k] bool, false for padding in `key_index`, whose keys and values are zeroed.
        batches: (number of segments, queries, keys) per batch of equally long segments (sdpa only).
        order, key_order: int64, query rows and key rows by batch; `None` if rows stay in place (sdpa only).
        places: [t] int64, index of each row in the concatenated results of the batches or tiles; `None` if rows stay
            in place.
        mask: [most queries of a segment with a prefix, most keys], additive (sdpa with prefixes only).
        tiles: by ascending `number` (tiled only).
        window: maximum number of visible keys, including a query's own; 0 means no limit.
    """

    backend: str
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    key_index: torch.Tensor | None = None
    key_is_real: torch.Tensor | None = None
    batches: tuple[tuple[int, int, int], ...] = ()
    order: torch.Tensor | None = None
    key_order: torch.Tensor | None = None
    places: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    tiles: tuple[TileBatch, ...] = ()
    window: int = 0

    @property
    def lengths(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Arguments of a variable-length kernel: cu_seqlens and maximum lengths of queries and of keys."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k
