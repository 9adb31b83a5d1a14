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
    """

    number: int  # index of the tile in its sequence; 0 for positions 0 to 31
    queries: torch.Tensor  # [b * 32] int64, query rows of b tiles
    # first_key, last_key: [b] int64, first and last key row of each tile's sequence.
    first_key: torch.Tensor
    last_key: torch.Tensor


@dataclass(frozen=True)
class Segments:
    """Attention pattern of a packed row for one backend: segments, each with rows of queries and rows of keys."""

    backend: str
    cu_seqlens_q: torch.Tensor  # [num_segments + 1] int32
    cu_seqlens_k: torch.Tensor  # [num_segments + 1] int32
    max_seqlen_q: int
    max_seqlen_k: int
    # [k] int64, concatenated key rows of the segments; `None` if they are the packed rows in place.
    key_index: torch.Tensor | None = None
    # [k] bool, false for padding in `key_index`, whose keys and values are zeroed.
    key_is_real: torch.Tensor | None = None
    # (number of segments, queries, keys) per batch of equally long segments (sdpa only).
    batches: tuple[tuple[int, int, int], ...] = ()
    # order, key_order: int64, query rows and key rows by batch; `None` if rows stay in place (sdpa only).
    order: torch.Tensor | None = None
    key_order: torch.Tensor | None = None
    # [t] int64, index of each row in the concatenated results of the batches or tiles; `None` if rows stay in place.
    places: torch.Tensor | None = None
    # [most queries of a segment with a prefix, most keys], additive (sdpa with prefixes only).
    mask: torch.Tensor | None = None
    tiles: tuple[TileBatch, ...] = ()  # by ascending `number` (tiled only)
    window: int = 0  # maximum number of visible keys, including a query's own; 0 means no limit

    @property
    def lengths(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Arguments of a variable-length kernel: cu_seqlens and maximum lengths of queries and of keys."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k
