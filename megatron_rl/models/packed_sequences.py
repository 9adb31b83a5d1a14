# SPDX-License-Identifier: Apache-2.0
"""The microbatch description that attention layers receive as megatron-core's `packed_seq_params`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.models.attention_backends import build_segments, choose_attention_backend
from megatron_rl.models.rotary import RotaryTable, compute_rotary_table
from megatron_rl.models.segments import Segments
from megatron_rl.parallel.layout import shard_rows
from megatron_rl.samples.batch import MicrobatchSlice
from megatron_rl.weights.families import FAMILIES, ModelShape

if TYPE_CHECKING:
    from megatron_rl.models.delta_rule import SequenceRows
    from megatron_rl.models.routing import RowRoutes


@dataclass(frozen=True)
class CachedRows:
    """KV cache of a rank's layers, and the slots in it of the t rows of one forward.

    Attributes:
        layers: layer number (megatron-core's) -> keys and values, [slots, ng/tp, d] each.
        slots: [t] int64, slot of each row.
    """

    layers: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    slots: torch.Tensor

    def store(self, layer_number: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's rotated keys and values [t, ng/tp, d]; return all of its cache, [slots, ng/tp, d] each."""
        keys, values = self.layers[layer_number]
        keys.index_copy_(0, self.slots, key)
        values.index_copy_(0, self.slots, value)
        return keys, values


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """megatron-core's `PackedSeqParams` of a row of t tokens, with positions and shared prompts.

    Attributes:
        segments: attention pattern of the whole row, over all context parallel shards.
        sliding: (layer numbers, segments, rotary table) of sliding-window layers, or `None`.
        rotary_table: [t/cp, 1, d], of this rank's shard.
        unrotated_layers: layer numbers (megatron-core's) without rotary embedding.
        cache: KV cache that `segments` index, without context parallelism; or `None`.
        routes: expert routes of this rank's rows, or `None`.
        sequence_rows: of the whole row, in models with gated delta nets, else `None`.
    """

    segments: Segments
    rotary_table: RotaryTable
    unrotated_layers: frozenset[int] = frozenset()
    sliding: tuple[frozenset[int], Segments, RotaryTable] | None = None
    cache: CachedRows | None = None
    routes: RowRoutes | None = None
    sequence_rows: SequenceRows | None = None

    def of_layer(self, number: int) -> tuple[Segments, RotaryTable | None]:
        """Return segments and rotary table (`None` for a layer without rotation) of megatron-core's layer `number`."""
        if self.sliding is not None and number in self.sliding[0]:
            return self.sliding[1:]
        return self.segments, None if number in self.unrotated_layers else self.rotary_table


def build_packed_sequences(
    piece: MicrobatchSlice,
    position_ids: torch.Tensor,
    shape: ModelShape,
    *,
    dtype: torch.dtype,
    cp_size: int = 1,
    cp_rank: int = 0,
    backend: str | None = None,
) -> PackedSequences:
    """Build the description of a microbatch for the layers of a stage.

    Args:
        position_ids: [t] of the whole microbatch, not of a shard.
        cp_size, cp_rank: this rank holds the rows `shard_rows(t, cp_size, cp_rank)`.
        backend: attention backend; the fastest if `None`.
    """
    mine = position_ids[shard_rows(len(position_ids), cp_size, cp_rank)]
    if backend is None and (shape.sliding_layers or FAMILIES[shape.family].has_sinks):
        fastest = choose_attention_backend(mine.device, dtype)
        # "efficient" has no sliding window; only "sdpa" has sinks.
        backend = "sdpa" if fastest == "efficient" or FAMILIES[shape.family].has_sinks else fastest
    segments = build_segments(piece.cu_seqlens, piece.max_seqlen, piece.keys, dtype, backend, piece.is_bucketed)
    table = partial(
        compute_rotary_table,
        mine,
        head_dim=shape.rotary_dim or shape.head_dim,
        dtype=dtype,
        neighbors=FAMILIES[shape.family].rotates_neighbors,
    )
    rotary_table = table(theta=shape.rope_theta, scaling=shape.rope_scaling)
    sliding = None
    if shape.sliding_layers:
        numbers = frozenset(layer + 1 for layer in shape.sliding_layers)
        own = table(theta=shape.sliding_rope_theta) if shape.sliding_rope_theta else rotary_table
        sliding = numbers, replace(segments, window=shape.sliding_window), own
    sequence_rows = None
    if shape.delta_net:
        from megatron_rl.models.delta_rule import build_sequence_rows

        sequence_rows = build_sequence_rows(segments, shape.delta_net.kernel)
    return PackedSequences(
        qkv_format="thd",
        segments=segments,
        cu_seqlens_q=segments.cu_seqlens_q,
        cu_seqlens_kv=segments.cu_seqlens_k,
        max_seqlen_q=segments.max_seqlen_q,
        max_seqlen_kv=segments.max_seqlen_k,
        rotary_table=rotary_table,
        sliding=sliding,
        unrotated_layers=frozenset(layer + 1 for layer in shape.unrotated_layers),
        sequence_rows=sequence_rows,
    )
