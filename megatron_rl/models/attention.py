# SPDX-License-Identifier: Apache-2.0
"""Self-attention for megatron-core layer specs: blocked fused QKV rows and packed, causal core attention.

megatron-core's `DotProductAttention` refuses packed sequences and context parallelism, and its rotary embedding
supports neither contiguous shards nor shared prompts (hence `position_embedding_type="none"`). Layers receive the
microbatch's description as `packed_seq_params`.

A segment's keys are its prefix (a shared prompt), if any, then its own rows: with n queries and k keys, query i sees
keys 0 .. k - n + i (aligned at the bottom right). All backends compute the same:

* sdpa: any device; one call per segment size, bitwise equal to a call per segment; reads lengths on the host;
* the backends in `attention_kernels.py`, for GPUs and for batch invariance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.typed_torch import apply_module
from torch.autograd.function import once_differentiable

from megatron_rl.models.segments import Segments
from megatron_rl.models.stages import make_parameter
from megatron_rl.parallel.collectives import choose_triton_kernels
from megatron_rl.samples.batch import MicrobatchSlice, SegmentKeys
from megatron_rl.weights.families import FAMILIES, ModelShape

if TYPE_CHECKING:
    from megatron_rl.models.delta_rule import SequenceRows
    from megatron_rl.models.routing import RowRoutes
    from megatron_rl.weights.rope import RopeScaling


_SINK_CHANNELS = 8  # one holds the sink; GPU kernels require head sizes that are multiples of 8


@cache
def choose_attention_backend(device: torch.device, dtype: torch.dtype) -> str:
    """Return the fastest backend that works for this device and dtype."""
    if device.type != "cuda":
        return "sdpa"
    from megatron_rl.models.attention_kernels import find_kernel_failure, list_kernels

    return next((name for name in list_kernels(dtype) if find_kernel_failure(name, device, dtype) is None), "sdpa")


def build_segments(
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    keys: SegmentKeys | None,
    dtype: torch.dtype,
    backend: str | None = None,
    is_bucketed: bool = False,
) -> Segments:
    """Prepare the attention pattern of a microbatch for a backend, the fastest if `None`.

    Args:
        cu_seqlens: [num_segments + 1] int32.
        keys: key rows of each segment (a shared prefix, then its own); only its own if `None`.
        is_bucketed: whether `keys` may contain padding.
    """
    backend = backend or choose_attention_backend(cu_seqlens.device, dtype)
    cu_seqlens_k = cu_seqlens if keys is None else keys.cu_seqlens
    segments = Segments(
        backend,
        cu_seqlens,
        cu_seqlens_k,
        max_seqlen,
        max_seqlen if keys is None else keys.max_seqlen,
        None if keys is None else keys.index,
    )
    if keys is not None and is_bucketed:
        segments = replace(segments, key_index=keys.index.clamp(min=0), key_is_real=keys.index >= 0)
    if backend == "tiled":
        from megatron_rl.models.attention_kernels import build_tiles

        return build_tiles(segments)
    return _prepare_for_sdpa(segments, dtype) if backend == "sdpa" else segments


def _prepare_for_sdpa(segments: Segments, dtype: torch.dtype) -> Segments:
    sizes = [segments.cu_seqlens_q.diff().tolist(), segments.cu_seqlens_k.diff().tolist()]
    lengths = list(zip(*sizes, strict=True))
    mask, behind_prefix = None, [(n, k - n) for n, k in lengths if k > n > 0]
    if behind_prefix:
        rows, prefix = (max(sizes) for sizes in zip(*behind_prefix, strict=True))
        # Row i sees the prefix and i + 1 own keys; smaller segments use a corner (fewer rows, prefix cut on the left).
        hidden = torch.full((rows, prefix + rows), float("-inf"), dtype=dtype, device=segments.cu_seqlens_q.device)
        mask = hidden.triu(prefix + 1)
    segments = replace(segments, mask=mask)
    members: dict[tuple[int, int], list[int]] = {}
    for index, pair in enumerate(lengths):
        if any(pair):  # bucketed microbatches have empty segments
            members.setdefault(pair, []).append(index)
    num_segments = sum(map(len, members.values()))
    if 2 * len(members) > num_segments:  # few equal sizes: reordering costs more than batching saves
        return replace(segments, batches=tuple((1, *pair) for pair in lengths if any(pair)))
    by_batch = [index for group in members.values() for index in group]
    order, key_order = (_order_rows(part, by_batch, segments.cu_seqlens_q.device) for part in sizes)
    batches = tuple((len(group), *pair) for pair, group in members.items())
    return replace(segments, batches=batches, order=order, key_order=key_order, places=order.argsort())


def _order_rows(lengths: Sequence[int], segments: Sequence[int], device: torch.device) -> torch.Tensor:
    sizes = np.array(lengths)
    chosen = sizes[segments]
    firsts = (sizes.cumsum() - sizes)[segments] - chosen.cumsum() + chosen
    return torch.from_numpy(np.repeat(firsts, chosen) + np.arange(chosen.sum())).to(device)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal softmax attention of each segment's queries to its keys, [t, n, d].

    Args:
        query: [t, n, d]; key and value are [t, ng, d], with n a multiple of ng.
        sinks: [n] score of an extra key with value 0 per head (attention sinks), or `None`; "sdpa" only.
    """
    if segments.key_index is not None:
        key, value = (x.index_select(0, segments.key_index) for x in (key, value))
    if segments.key_is_real is not None:
        key, value = (torch.where(segments.key_is_real[:, None, None], x, 0.0) for x in (key, value))
    if segments.backend == "sdpa":
        return _attend_sdpa(query, key, value, segments, scale, sinks)
    assert sinks is None, "build_packed_sequences chooses sdpa"
    from megatron_rl.models.attention_kernels import BACKENDS

    return BACKENDS[segments.backend](query, key, value, segments, scale)


def _attend_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if segments.order is not None and segments.key_order is not None:
        query = query.index_select(0, segments.order)
        key, value = (x.index_select(0, segments.key_order) for x in (key, value))
    rows, keys = ([count * size[i] for count, *size in segments.batches] for i in (0, 1))
    outputs = []
    # `split` instead of slices: the gradient of each slice would be as large as the whole row.
    parts = zip(segments.batches, query.split(rows), key.split(keys), value.split(keys), strict=True)
    for (count, n, k), *qkv in parts:
        if n == 0:
            continue
        batch = [x.unflatten(0, (count, -1)).transpose(1, 2) for x in qkv]  # [segments, heads, s, d]
        mask = None
        if sinks is not None:
            seen = _see(n, k, segments.window, query.device)
            batch, mask = _add_sink(*batch, sinks, scale), F.pad(seen, (0, 1), value=True)
        elif 0 < segments.window < k:
            mask = _see(n, k, segments.window, query.device)
        elif n < k:
            assert segments.mask is not None, "made for every segment behind a prefix"
            left = segments.mask.shape[1] - segments.mask.shape[0] - (k - n)
            mask = segments.mask[:n, left : left + k]
        output = F.scaled_dot_product_attention(
            *batch, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        outputs.append(output[..., : query.shape[-1]].transpose(1, 2).flatten(0, 1))
    output = torch.cat(outputs)
    return output if segments.places is None else output.index_select(0, segments.places)


def _add_sink(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, scale: float
) -> list[torch.Tensor]:
    """Add a key with the score `sinks` [n] and the value 0 to each head of [b, n, s, d]; query and key get wider."""
    wider = F.pad(query, (0, _SINK_CHANNELS))
    channel = torch.zeros_like(wider[0, 0, 0])
    channel[query.shape[-1]] = 1.0
    query = wider + sinks.to(query.dtype)[:, None, None] * channel
    key, value = (F.pad(x, (0, _SINK_CHANNELS)) for x in (key, value))
    sink_key = (channel / scale).expand(*key.shape[:2], 1, -1)
    return [query, torch.cat([key, sink_key], 2), F.pad(value, (0, 0, 0, 1))]


def _see(num_queries: int, num_keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask [queries, keys] bool, true for visible keys; the last query sees the last key."""
    last = num_keys - num_queries
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(last)
    return seen.triu(last - window + 1) if window else seen


class RotaryTable(NamedTuple):
    """Cosine and sine [t, 1, d] of each position; `neighbors`: rotated pairs are adjacent channels, not d/2 apart."""

    cosine: torch.Tensor
    sine: torch.Tensor
    neighbors: bool


def compute_rotary_table(
    position_ids: torch.Tensor,
    *,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
    neighbors: bool = False,
) -> RotaryTable:
    """Compute the rotary table of each position.

    Args:
        position_ids: [t] int64.
        head_dim: d, even.
        theta: base of the frequencies theta^(-2i/d).
        dtype: of the table; angles are computed in float32, as in transformers.
        neighbors: whether pairs are adjacent channels (GLM-4, DeepSeek-V3) or d/2 apart (Llama).

    Returns:
        Cosine and sine, [t, 1, d]; the first sine of a pair is negated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=position_ids.device).float() / head_dim
    periods = theta**exponents
    frequencies, growth = 1.0 / periods, 1.0
    if scaling is not None:
        from megatron_rl.weights.rope import scale_frequencies

        frequencies, growth = scale_frequencies(periods, theta, scaling)
    angles = torch.outer(position_ids.float(), frequencies)[:, None]  # [t, 1, d/2]
    cosine, sine = ((x if growth == 1.0 else x * growth).to(dtype) for x in (angles.cos(), angles.sin()))
    if neighbors:
        return RotaryTable(cosine.repeat_interleave(2, -1), torch.stack([-sine, sine], -1).flatten(-2), True)
    return RotaryTable(torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1), False)


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, neighbors: bool) -> torch.Tensor:
    """Rotate the first d channels of [t, heads, ...] by a `RotaryTable` of width d (arXiv 2104.09864, equation 34).

    megatron-core rotates by row, which contiguous context parallel shards and shared prompts do not allow.
    """
    width = cosine.shape[-1]
    if width == heads.shape[-1]:
        return _Rotation.apply(heads, cosine, sine, neighbors)
    return torch.cat([_Rotation.apply(heads[..., :width], cosine, sine, neighbors), heads[..., width:]], -1)


class _Rotation(torch.autograd.Function):
    """Rotation whose backward rotates by the negative angle."""

    @staticmethod
    def forward(
        ctx: Any, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, neighbors: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.neighbors = neighbors
        return _turn(heads, cosine, sine, neighbors, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turn(gradient, cosine, sine, ctx.neighbors, -1.0), None, None, None


def _turn(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, neighbors: bool, sign: float) -> torch.Tensor:
    kernels = None if neighbors or heads.dim() != 3 or heads.stride(-1) != 1 else choose_triton_kernels(heads)
    if kernels is not None:
        return kernels.rotate_halves(heads, cosine, sine, sign)
    sine = sine if sign == 1.0 else -sine
    if neighbors:
        first, second = heads.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([second, first], -1).flatten(-2).mul_(sine).add_(heads * cosine)
    first, second = heads.chunk(2, -1)
    return torch.cat([second, first], -1).mul_(sine).add_(heads * cosine)


@dataclass(frozen=True)
class CachedRows:
    """KV cache of a rank's layers, and the slots in it of the t rows of one forward."""

    # Layer number (megatron-core's) -> keys and values, [slots, ng/tp, d] each.
    layers: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    slots: torch.Tensor  # [t] int64, slot of each row

    def store(self, layer_number: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's rotated keys and values [t, ng/tp, d]; return all of its cache, [slots, ng/tp, d] each."""
        keys, values = self.layers[layer_number]
        keys.index_copy_(0, self.slots, key)
        values.index_copy_(0, self.slots, value)
        return keys, values


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """megatron-core's `PackedSeqParams` of a row of t tokens, with positions and shared prompts."""

    segments: Segments  # attention pattern of the whole row, over all context parallel shards
    rotary_table: RotaryTable  # [t/cp, 1, d], of this rank's shard
    unrotated_layers: frozenset[int] = frozenset()  # layer numbers (megatron-core's) without rotary embedding
    # (layer numbers, segments, rotary table) of sliding-window layers, or `None`.
    sliding: tuple[frozenset[int], Segments, RotaryTable] | None = None
    cache: CachedRows | None = None  # KV cache that `segments` index, without context parallelism; or `None`
    routes: RowRoutes | None = None  # expert routes of this rank's rows, or `None`
    sequence_rows: SequenceRows | None = None  # of the whole row, in models with gated delta nets, else `None`

    def of_layer(self, number: int) -> tuple[Segments, RotaryTable | None]:
        """Return segments and rotary table (`None` for a layer without rotation) of megatron-core's layer `number`."""
        if self.sliding is not None and number in self.sliding[0]:
            return self.sliding[1:]
        return self.segments, None if number in self.unrotated_layers else self.rotary_table


def shard_rows(num_tokens: int, cp_size: int, cp_rank: int) -> slice:
    """Return a rank's rows of a packed row of `num_tokens`, a multiple of `cp_size`."""
    assert num_tokens % cp_size == 0, f"{num_tokens} tokens over {cp_size} ranks"
    length = num_tokens // cp_size
    return slice(cp_rank * length, (cp_rank + 1) * length)


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
        # "efficient" has no sliding window; only "sdpa" has sinks, and heads of more than 256 channels.
        is_special = FAMILIES[shape.family].has_sinks or shape.full.head_dim > 256
        backend = "sdpa" if fastest == "efficient" or is_special else fastest
    segments = build_segments(piece.cu_seqlens, piece.max_seqlen, piece.keys, dtype, backend, piece.is_bucketed)
    table = partial(compute_rotary_table, mine, dtype=dtype, neighbors=FAMILIES[shape.family].rotates_neighbors)
    head_dim = shape.rotary_dim or shape.full.head_dim
    rotary_table = table(head_dim=head_dim, theta=shape.rope_theta, scaling=shape.rope_scaling)
    sliding = None
    if shape.sliding_layers:
        numbers = frozenset(layer + 1 for layer in shape.sliding_layers)
        base = shape.sliding_rope_theta
        own = table(head_dim=shape.rotary_dim or shape.head_dim, theta=base) if base else rotary_table
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


class BlockedSelfAttention(SelfAttention):
    """Self-attention whose fused projection has rows `[q; k; v]` on each TP rank, not interleaved per KV group.

    This is the rollout engine's order, so both can share storage at equal TP.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """Project [t, 1, h] to query [t, 1, np, d], key and value [t, 1, ng/tp, d], optionally gates [t, 1, np, d]."""
        assert key_value_states is None and split_qkv, "plain self-attention only"
        d, np_ = self.hidden_size_per_attention_head, self.num_attention_heads_per_partition
        of_key = self.num_query_groups_per_partition * d
        mixed, _ = apply_module(self.linear_qkv)(hidden_states)  # [t, 1, (np + 2 ng/tp) * d]
        of_query = np_ * d * (2 if output_gate else 1)
        query, key, value = (part.unflatten(-1, (-1, d)) for part in mixed.split((of_query, of_key, of_key), dim=-1))
        gates = []
        if output_gate:
            query, gate = query.unflatten(-2, (-1, 2)).unbind(-2)
            gates = [gate]
        norms: tuple[Any, Any] = (self.q_layernorm, self.k_layernorm)  # the layer spec has both or neither
        if norms[0] is not None:
            query, key = norms[0](query), norms[1](key)
        return query, key, value, *gates


class PackedAttention(MegatronModule):
    """Causal core attention over packed sequences: rotation, context parallel exchange or KV cache, and attention."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        layer_number: int = 1,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        assert dropout == 0.0, "RL scores what it sampled: attention dropout must be 0"
        assert config.kv_channels is not None, "megatron-core computes it where it is not set"
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        cp_group = pg_collection.cp if pg_collection is not None else None
        self._cp_group = cp_group if cp_group is not None and cp_group.size() > 1 else None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            # [np] attention sinks (megatron-core's name), or `None`.
            self.softmax_offset = make_parameter(config, torch.zeros, heads, split_dim=0)
        else:
            self.softmax_offset = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> torch.Tensor:
        """Compute attention: [t/cp, np * d_v].

        Args:
            query: [t/cp, np, d], not rotated; key and value have ng/tp heads, value d_v <= d channels.
        """
        assert attention_mask is None and attention_bias is None, "causal attention only"
        assert isinstance(packed_seq_params, PackedSequences), "packed sequences with positions only"
        segments, table = packed_seq_params.of_layer(self.layer_number)
        if table is not None:
            query, key = (rotate(x, *table) for x in (query, key))
        width, cp_group = value.shape[-1], self._cp_group
        if width < key.shape[-1]:  # kernels take heads of one width
            value = F.pad(value, (0, key.shape[-1] - width))
        if packed_seq_params.cache is not None:
            cp_group, (key, value) = None, packed_seq_params.cache.store(self.layer_number, key, value)
        sinks = self.softmax_offset
        if cp_group is None:
            return attend(query, key, value, segments, self.scale, sinks)[..., :width].flatten(1)
        from megatron_rl.parallel.ulysses import exchange_to_heads, exchange_to_tokens

        query, key, value = exchange_to_heads(query, key, value, cp_group)
        sinks = sinks if sinks is None else sinks.chunk(cp_group.size())[cp_group.rank()]
        output = exchange_to_tokens(attend(query, key, value, segments, self.scale, sinks), cp_group)
        return output[..., :width].flatten(1)
