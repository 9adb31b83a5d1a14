# SPDX-License-Identifier: Apache-2.0
"""Causal attention over the segments of a packed row, by the fastest backend that works on the device.

A segment's keys are its prefix (a shared prompt), if any, then its own rows: with n queries and k keys, query i sees
keys 0 .. k - n + i (aligned at the bottom right). All backends compute the same:

* sdpa: any device; one call per segment size, bitwise equal to a call per segment; reads lengths on the host;
* the backends in `attention_kernels.py`, for GPUs and for batch invariance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from megatron_rl.models.segments import Segments
from megatron_rl.samples.batch import SegmentKeys

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
