# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant causal attention: the bits of a row depend only on its own sequence.

The queries of a tile of 32 positions attend to all keys up to the tile's end, in an sdpa call whose shape depends only
on the tile's number (missing rows are masked fillers). So decoding, a response behind a shared prompt, and a whole
sequence have equal bits. Tiles of one number form a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

TILE = 32


@dataclass(frozen=True)
class TileBatch:
    """All tiles of one number.

    Attributes:
        number: 0 for positions 0 to 31.
        queries: [b * 32] int64, query rows of b tiles.
        first_key, last_key: [b] int64, first and last key row of each tile's sequence.
    """

    number: int
    queries: torch.Tensor
    first_key: torch.Tensor
    last_key: torch.Tensor


@dataclass(frozen=True)
class Tiles:
    """The tiles of a packed row.

    Attributes:
        batches: sorted by number.
        places: [t] int64, index of each row in the concatenated queries.
    """

    batches: tuple[TileBatch, ...]
    places: torch.Tensor


def build_tiles(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> Tiles:
    """Cut segments into tiles.

    Args:
        cu_seqlens_q, cu_seqlens_k: [num_segments + 1]; n queries of a segment have positions k - n to k - 1 of its k
            keys.
    """
    members: dict[int, list[int]] = {}
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for segment, (n, k) in enumerate(zip(_diff(ends_q), _diff(ends_k), strict=True)):
        if n:
            for number in range((k - n) // TILE, (k - 1) // TILE + 1):
                members.setdefault(number, []).append(segment)
    places = torch.empty(ends_q[-1], dtype=torch.int64, device=cu_seqlens_q.device)
    batches, base = [], 0
    inside = torch.arange(TILE, device=cu_seqlens_q.device)
    for number, segments in sorted(members.items()):
        index = torch.tensor(segments, device=cu_seqlens_q.device)
        start, stop = cu_seqlens_q[index].long(), cu_seqlens_q[index + 1].long()
        first_key, last_key = cu_seqlens_k[index].long(), cu_seqlens_k[index + 1].long() - 1
        offset = (last_key + 1 - first_key) - (stop - start)  # position of the segment's first query
        rows = (start - offset + number * TILE)[:, None] + inside
        is_query = (rows >= start[:, None]) & (rows < stop[:, None])
        places[rows[is_query]] = base + is_query.flatten().nonzero()[:, 0]
        base += rows.numel()
        batches.append(TileBatch(number, rows.clamp(start[:, None], stop[:, None] - 1).flatten(), first_key, last_key))
    return Tiles(tuple(batches), places)


def _diff(ends: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in zip(ends, ends[1:], strict=False)]


def attend_in_tiles(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiles: Tiles, scale: float
) -> torch.Tensor:
    """Compute softmax attention of [t, n, d] queries to [k, ng, d] keys and values: [t, n, d]."""
    outputs = []
    for batch in tiles.batches:
        num_keys = (batch.number + 1) * TILE
        positions = torch.arange(num_keys, device=query.device)
        keys = (batch.first_key[:, None] + positions).minimum(batch.last_key[:, None]).flatten()
        output = F.scaled_dot_product_attention(
            *(
                x.index_select(0, rows).unflatten(0, (len(batch.first_key), -1)).transpose(1, 2)
                for x, rows in ((query, batch.queries), (key, keys), (value, keys))
            ),
            attn_mask=positions <= positions[-TILE:, None],
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, tiles.places)
