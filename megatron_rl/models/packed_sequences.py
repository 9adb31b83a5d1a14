# SPDX-License-Identifier: Apache-2.0
"""What attention must know of a microbatch; it travels through megatron-core's layers as their `packed_seq_params`.

It is made once per microbatch and pipeline stage: positions are turned into rotary tables here, and all layers and
recomputations read the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.models.attention_backends import Segments, build_segments, choose_attention_backend
from megatron_rl.models.rotary import RotaryTable, compute_rotary_table
from megatron_rl.packing.batch import MicrobatchSlice
from megatron_rl.parallel.ulysses import shard_rows
from megatron_rl.weights.families import FAMILIES, ModelShape

if TYPE_CHECKING:
    from megatron_rl.models.delta_rule import SequenceRows
    from megatron_rl.models.routing import RowRoutes


@dataclass(frozen=True)
class CachedRows:
    """The cache of a rank's layers, as the rows of one forward use it.

    Attributes:
        layers: keys and values [slots, ng/tp, d] by megatron-core's number of the layer.
        slots: [t] int64, where the keys and values of each row go.
    """

    layers: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    slots: torch.Tensor

    def store(self, layer_number: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [t, ng/tp, d] of a layer, key rotated; returns all keys and values of that layer."""
        keys, values = self.layers[layer_number]
        keys.index_copy_(0, self.slots, key)
        values.index_copy_(0, self.slots, value)
        return keys, values


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """megatron-core's parameters with positions and shared prompts.

    Attributes:
        segments: who attends to whom in the whole row, all context parallel shards together.
        sliding: the same where a window slides, and its rotary table, for the layers of these megatron-core's numbers.
        rotary_table: [t/cp, 1, d] of the rows of this rank's shard.
        unrotated_layers: megatron-core's numbers of the layers that do not use it.
        cache: keys and values of earlier forwards, which `segments` see, and room for these rows. This rank
            has whole sequences then, whatever the context parallel size. None: rows see each other only.
        routes: of the rows that this rank's layers are given; None: nobody asks.
        sequence_rows: of gated delta nets, in the whole row; None: the model has none.
    """

    segments: Segments
    rotary_table: RotaryTable
    unrotated_layers: frozenset[int] = frozenset()
    sliding: tuple[frozenset[int], Segments, RotaryTable] | None = None
    cache: CachedRows | None = None
    routes: RowRoutes | None = None
    sequence_rows: SequenceRows | None = None

    def of_layer(self, number: int) -> tuple[Segments, RotaryTable | None]:
        """What a layer of megatron-core's number uses; no table: it does not rotate."""
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
    """Describe a microbatch to the layers of a stage.

    Args:
        piece: its slice.
        position_ids: [t] of the whole microbatch, whatever the shard.
        shape: of the model.
        dtype: of the activations.
        cp_size, cp_rank: this rank holds the rows `shard_rows(t, cp_size, cp_rank)`.
        backend: of attention; None: the fastest.
    """
    mine = position_ids[shard_rows(len(position_ids), cp_size, cp_rank)]
    if backend is None and (shape.sliding_layers or FAMILIES[shape.family].has_sinks):
        fastest = choose_attention_backend(mine.device, dtype)
        # That kernel knows no window, and none knows sinks.
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
