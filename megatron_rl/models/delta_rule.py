# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule (arXiv 2412.06464, equation 10) over packed sequences, in plain torch.

A head's state S [d_k, d_v] starts each sequence at zero. Token t decays it, corrects its value for a key, and reads it:

    S <- exp(g_t) S
    S <- S + beta_t k_t (v_t - S^T k_t)^T
    o_t = S^T q_t

Chunks of 64 tokens are computed in a batch (section 3.3); states are carried from chunk to chunk. A segment behind a
shared prefix is recomputed with its prefix. flash-linear-attention's kernel, which rounds its products' inputs to 16
bits, is used instead if it is installed and equal in a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megatron_rl.models.segments import Segments
from megatron_rl.parallel.collectives import find_failure

CHUNK = 64
_EPSILON = 1e-6  # in the L2 norm of queries and keys


@dataclass(frozen=True)
class SequenceRows:
    """Indices between a packed row of t tokens and its sequences (with prefixes) in chunks of 64, most chunks first."""

    # [c] int64, input rows of the convolution: each sequence after `width - 1` zero rows (index t).
    convolved: torch.Tensor
    # [chunks * 64] int64, convolution outputs in the chunks (all first chunks, all second chunks, ...); index c - width
    # + 1 stands for zeros.
    results: torch.Tensor
    tokens: torch.Tensor  # [chunks * 64] int64, packed row at each chunk position; t stands for zeros
    counts: tuple[int, ...]  # number of sequences that have a first, second, ... chunk.
    places: torch.Tensor  # [t] int64, chunk position of each packed row
    whole: torch.Tensor  # [n] int64, chunk positions of all tokens, sequence by sequence
    cu_seqlens: torch.Tensor  # [sequences + 1] int64, sequence boundaries in `whole`


def build_sequence_rows(segments: Segments, width: int) -> SequenceRows:
    """Build the indices of a microbatch for a convolution of `width` tokens; reads lengths on the host."""
    ends, key_ends = segments.cu_seqlens_q.tolist(), segments.cu_seqlens_k.tolist()
    index = np.arange(ends[-1]) if segments.key_index is None else segments.key_index.cpu().numpy()
    # Of each segment: the number of its own rows, and its rows with the prefix first.
    parts = zip(ends, ends[1:], key_ends, key_ends[1:], strict=False)
    sequences = [(stop - start, index[first:last]) for start, stop, first, last in parts if stop > start]
    sequences.sort(key=lambda sequence: -_count_chunks(sequence[1]))
    num_tokens, gap = int(segments.cu_seqlens_q[-1]), np.zeros(width - 1, np.int64)
    num_chunks = [_count_chunks(rows) for _, rows in sequences]
    counts = tuple(sum(n > number for n in num_chunks) for number in range(num_chunks[0]))
    firsts = np.cumsum([0, *counts[:-1]]) * CHUNK  # position of the first, second, ... chunks
    convolved = np.concatenate([part for _, rows in sequences for part in (gap + num_tokens, rows)])
    results = np.full(sum(counts) * CHUNK, len(convolved) - width + 1)
    tokens, places, base = np.full_like(results, num_tokens), np.empty(num_tokens, np.int64), 0
    whole = []
    for number, (own, rows) in enumerate(sequences):
        offsets = np.arange(len(rows))
        at = firsts[offsets // CHUNK] + number * CHUNK + offsets % CHUNK
        results[at], tokens[at], places[rows[-own:]] = base + offsets, rows, at[-own:]
        whole.append(at)
        base += len(rows) + width - 1
    ends = np.cumsum([0, *map(len, whole)])
    arrays = convolved, results, tokens, places, np.concatenate(whole), ends
    found = (torch.from_numpy(array).to(segments.cu_seqlens_q.device) for array in arrays)
    return SequenceRows(next(found), next(found), next(found), counts, next(found), next(found), next(found))


def _count_chunks(rows: np.ndarray) -> int:
    return -(-len(rows) // CHUNK)


def convolve(x: torch.Tensor, weight: torch.Tensor, rows: SequenceRows) -> torch.Tensor:
    """Apply each channel's causal filter and SiLU to every sequence: [t, c] -> [chunks * 64, c] (`rows.results`).

    Args:
        weight: [c, 1, width].
    """
    gathered = _with_zeros(x).index_select(0, rows.convolved)
    output = F.silu(F.conv1d(gathered.t()[None], weight, groups=len(weight)))[0].t()
    return _with_zeros(output).index_select(0, rows.results)


def apply_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rows: SequenceRows,
) -> torch.Tensor:
    """Run the gated delta rule of every head over every sequence, in float32: [t, n, d_v].

    Args:
        query, key: [chunks * 64, n_k, d_k] in the order of `convolve`; normalized here.
        value: [chunks * 64, n, d_v], n a multiple of n_k.
        decay: [t, n] float32, log of each token's factor of the state.
        beta: [t, n], share of the correction that is written.
    """
    repeats = value.shape[1] // key.shape[1]
    query, key = (_normalize(x.float()).repeat_interleave(repeats, 1) for x in (query, key))
    decay, beta = (_with_zeros(x.float()).index_select(0, rows.tokens) for x in (decay, beta))
    query = query * key.shape[-1] ** -0.5
    # [chunks, n, 64, ...]
    query, key, value, decay, beta = (
        x.unflatten(0, (-1, CHUNK)).transpose(1, 2) for x in (query, key, value.float(), decay, beta)
    )
    output = _run_chunks(query, key, value, decay, beta[..., None], rows.counts)
    return output.transpose(1, 2).flatten(0, 1).index_select(0, rows.places)


def _run_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    counts: Sequence[int],
) -> torch.Tensor:
    total = decay.cumsum(-1)  # [chunks, n, 64] log of the decay since the chunk began
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(above, float("-inf"))
    between = between.exp()  # decay from the column's token to the row's
    grown, left = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    corrections = (beta * key @ key.mT) * between  # the solver treats the diagonal as ones
    both = torch.cat([beta * value, beta * key * grown], -1)
    solved = torch.linalg.solve_triangular(corrections, both, upper=False, unitriangular=True)
    # Writes from an empty state; correction per unit of state.
    written, answers = solved.split([value.shape[-1], key.shape[-1]], -1)
    scores, reads, writes = (query @ key.mT) * between, query * grown, (key * left).mT
    kept = total[..., -1, None, None].exp()
    state = query.new_zeros(counts[0], *writes.shape[1:3], value.shape[-1])
    outputs = []
    parts = (x.split(counts) for x in (written, answers, scores, reads, writes, kept))
    for new, answer, score, read, write, rest in zip(*parts, strict=True):
        state = state[: len(new)]
        new = new - answer @ state
        outputs.append(read @ state + score @ new)
        state = state * rest + write @ new
    return torch.cat(outputs)


def _normalize(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


def _with_zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


# (query, key, value, decay, beta [1, n, heads, ...], normalizing query and key, cu_seqlens) -> output and last state
Kernel = Callable[..., tuple[torch.Tensor, Any]]
DeltaRule = Callable[..., torch.Tensor]  # signature of `apply_delta_rule`


@cache
def choose_delta_rule(device: torch.device, dtype: torch.dtype) -> DeltaRule:
    """Return the fastest implementation that works for this device and dtype."""
    if device.type != "cuda" or dtype != torch.bfloat16 or find_delta_failure(device) is not None:
        return apply_delta_rule
    return _apply_fla


@cache
def find_delta_failure(device: torch.device) -> str | None:
    """Try flash-linear-attention: return `None` if it agrees with plain torch, "" if not installed, else the error."""

    def call() -> None:
        ends = torch.tensor([0, 70, 75], dtype=torch.int32, device=device)
        rows = build_sequence_rows(Segments("sdpa", ends, ends, 70, 70), 2)
        found, expected = (_run_trial(rule, rows, device) for rule in (_apply_fla, apply_delta_rule))
        for got, want in zip(found, expected, strict=True):
            assert (got - want).abs().max() <= 0.05 * want.abs().max()

    return find_failure("fla", call)


def _run_trial(rule: DeltaRule, rows: SequenceRows, device: torch.device) -> list[torch.Tensor]:
    sizes = (len(rows.tokens), 2, 64), (len(rows.tokens), 2, 64), (len(rows.tokens), 4, 64), (75, 4), (75, 4)
    drawn = [torch.arange(float(torch.Size(size).numel()), device=device).mul(0.7).sin().view(size) for size in sizes]
    query, key, value, decay, beta = drawn
    inputs = [*(x.bfloat16() for x in (query, key, value)), -decay.abs(), (beta / 2 + 0.5).bfloat16()]
    inputs = [x.requires_grad_() for x in inputs]
    output = rule(*inputs, rows).float()
    return [output, *(x.float() for x in torch.autograd.grad(output.square().sum(), inputs))]


def _apply_fla(*inputs: Any) -> torch.Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]  # optional

    return apply_kernel(chunk_gated_delta_rule, *inputs)


def apply_kernel(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rows: SequenceRows,
) -> torch.Tensor:
    """Compute `apply_delta_rule` by flash-linear-attention's `kernel`; arguments and result are the same."""
    repeats = value.shape[1] // key.shape[1]
    query, key, value = (x.index_select(0, rows.whole) for x in (query, key, value))
    query, key = (x.repeat_interleave(repeats, 1) for x in (query, key))
    tokens = rows.tokens.index_select(0, rows.whole)
    decay, beta = decay.float().index_select(0, tokens), beta.index_select(0, tokens).to(value.dtype)
    packed = [x[None] for x in (query, key, value, decay, beta)]
    output, _ = kernel(*packed, use_qk_l2norm_in_kernel=True, cu_seqlens=rows.cu_seqlens)
    of_chunks = output.new_zeros(len(rows.tokens), *output.shape[2:]).index_copy(0, rows.whole, output[0])
    return of_chunks.index_select(0, rows.places)
