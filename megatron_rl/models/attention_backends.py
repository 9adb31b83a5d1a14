# SPDX-License-Identifier: Apache-2.0
"""Causal attention over the segments of a packed row, by the fastest backend that works on the device.

A segment's keys are its prefix (a shared prompt), if any, then its own rows: with n queries and k keys, query i sees
keys 0 .. k - n + i (aligned at the bottom right). All backends compute the same:

* flash-attn, torch-varlen: one kernel over all segments; CUDA, 16-bit types;
* efficient: torch's memory-efficient kernel over all segments; float32 as well;
* sdpa: any device; one call per segment size, bitwise equal to a call per segment; reads lengths on the host;
* tiled: bits of a row depend only on its own sequence; for batch invariance, never chosen for speed.

A kernel is chosen only after a trial on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalVariant

from megatron_rl.parallel.kernels import find_failure
from megatron_rl.samples.prefix import SegmentKeys

# Backends with one kernel over all segments, fastest first -> module that must be importable.
KERNELS = {"flash-attn": "flash_attn", "torch-varlen": "torch.nn.attention.varlen", "efficient": "torch"}
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_SINK_CHANNELS = 8  # one holds the sink; GPU kernels require head sizes that are multiples of 8
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


@cache
def choose_attention_backend(device: torch.device, dtype: torch.dtype) -> str:
    """Return the fastest backend that works for this device and dtype."""
    if device.type != "cuda":
        return "sdpa"
    return next((name for name in list_kernels(dtype) if find_kernel_failure(name, device, dtype) is None), "sdpa")


def list_kernels(dtype: torch.dtype) -> list[str]:
    """Return the names of the kernels that support a dtype, fastest first."""
    return [name for name in KERNELS if dtype in _KERNEL_DTYPES or name == "efficient"]


@cache
def find_kernel_failure(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Try one of `KERNELS`: return `None` if it agrees with sdpa, "" if it is not installed, else the error."""

    def call() -> None:
        cu_seqlens_q, cu_seqlens_k = (
            torch.tensor(ends, dtype=torch.int32, device=device) for ends in ([0, 3, 8], [0, 3, 10])
        )
        segments = Segments(backend, cu_seqlens_q, cu_seqlens_k, 5, 7)
        reference = _prepare_for_sdpa(replace(segments, backend="sdpa"), dtype)
        found, expected = (_run_trial(one, device, dtype) for one in (segments, reference))
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)

    return find_failure(KERNELS[backend], call)


def _run_trial(segments: Segments, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    inputs = [
        torch.arange(rows * heads * 64.0).mul(0.7).sin().view(rows, heads, 64).to(device, dtype).requires_grad_()
        for rows, heads in ((8, 2), (10, 1), (10, 1))
    ]
    output = _BACKENDS[segments.backend](*inputs, segments, 0.125)
    return [output, *torch.autograd.grad(output.float().square().sum(), inputs)]


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
    if sinks is not None:
        assert segments.backend == "sdpa", "build_packed_sequences chooses it"
        return _attend_sdpa(query, key, value, segments, scale, sinks)
    return _BACKENDS[segments.backend](query, key, value, segments, scale)


def _attend_flash_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]  # optional dependency

    return flash_attn_varlen_func(
        query,
        key,
        value,
        *segments.lengths,
        softmax_scale=scale,
        causal=True,
        **({"window_size": (segments.window - 1, 0)} if segments.window else {}),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _attend_torch_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # absent before torch 2.10

    output = varlen_attn(
        query,
        key,
        value,
        *segments.lengths,
        scale=scale,
        window_size=(segments.window - 1, 0),  # -1: all
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, torch.Tensor), "a pair only where an auxiliary output is asked for"
    return output


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


def _attend_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    assert not segments.window, "build_packed_sequences chooses another backend"
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    # The kernel under `scaled_dot_product_attention`, called directly because sdpa takes no segment boundaries.
    output, *_ = torch.ops.aten._efficient_attention_forward(
        query[None],
        key[None],
        value[None],
        None,
        *segments.lengths,
        0.0,
        int(CausalVariant.LOWER_RIGHT),
        needs_grad,
        scale=scale,
    )
    return output[0]


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


def build_tiles(segments: Segments) -> Segments:
    """Cut the queries of all segments into tiles of 32 positions (see `TileBatch`); reads lengths on the host.

    The n queries of a segment have positions k - n to k - 1 of its k keys.
    """
    cu_seqlens_q, cu_seqlens_k = segments.cu_seqlens_q, segments.cu_seqlens_k
    members: dict[int, list[int]] = {}
    for segment, (n, k) in enumerate(zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True)):
        if n:
            for number in range((k - n) // TILE, (k - 1) // TILE + 1):
                members.setdefault(number, []).append(segment)
    places = torch.empty(int(cu_seqlens_q[-1]), dtype=torch.int64, device=cu_seqlens_q.device)
    batches, base = [], 0
    inside = torch.arange(TILE, device=cu_seqlens_q.device)
    for number, chosen in sorted(members.items()):
        index = torch.tensor(chosen, device=cu_seqlens_q.device)
        start, stop = cu_seqlens_q[index].long(), cu_seqlens_q[index + 1].long()
        first_key, last_key = cu_seqlens_k[index].long(), cu_seqlens_k[index + 1].long() - 1
        offset = (last_key + 1 - first_key) - (stop - start)  # position of the segment's first query
        rows = (start - offset + number * TILE)[:, None] + inside
        is_query = (rows >= start[:, None]) & (rows < stop[:, None])
        places[rows[is_query]] = base + is_query.flatten().nonzero()[:, 0]
        base += rows.numel()
        batches.append(TileBatch(number, rows.clamp(start[:, None], stop[:, None] - 1).flatten(), first_key, last_key))
    return replace(segments, tiles=tuple(batches), places=places)


def attend_in_tiles(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """Compute `attend` in blocks of 32 queries (`TileBatch`): queries [t, n, d], keys and values [k, ng, d]."""
    assert segments.places is not None and not segments.window, "prepared for this backend, and not bitwise"
    outputs = []
    for batch in segments.tiles:
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
    return torch.cat(outputs).index_select(0, segments.places)


_BACKENDS: dict[str, Callable[..., torch.Tensor]] = {
    "flash-attn": _attend_flash_attn,
    "torch-varlen": _attend_torch_varlen,
    "efficient": _attend_efficient,
    "sdpa": _attend_sdpa,
    "tiled": attend_in_tiles,
}
