# SPDX-License-Identifier: Apache-2.0
"""Ulysses: which sizes the heads allow; attention between the exchanges against one rank.

Not covered: NCCL.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from distributed import run_ranks
from megatron_rl.models.attention import shard_rows
from megatron_rl.models.stages import combine_shards
from megatron_rl.parallel.ulysses import exchange_to_heads, exchange_to_tokens
from megatron_rl.types import UserError
from megatron_rl.weights.support import check_context_parallel

HEAD_DIM = 4
TOKENS = 8
# Heads, KV heads and ranks: KV heads divided, one each, and copied to two and four ranks.
CASES = [(8, 8, 2), (8, 2, 2), (8, 2, 4), (8, 1, 4), (4, 4, 4)]


def plan_heads(heads: int, kv_heads: int, cp_size: int) -> list[tuple[range, range]]:
    """The query heads of each rank, and the KV heads that these read without context parallelism."""
    queries = [range(r * heads // cp_size, (r + 1) * heads // cp_size) for r in range(cp_size)]
    return [(q, range(q[0] * kv_heads // heads, q[-1] * kv_heads // heads + 1)) for q in queries]


@pytest.mark.parametrize(
    ("sizes", "allowed"),
    [
        ((12, 2, 1, 8), [1, 2, 4, 6, 12]),  # 8 does not divide 12; 3 divides the query heads, but 2 KV heads do not fit
        ((32, 8, 2, 3), [1, 2, 4, 8, 16]),
        ((28, 4, 4, 2), [1, 7]),
    ],
)
def test_impossible_sizes_are_refused_with_the_possible_ones(sizes: tuple[int, ...], allowed: list[int]) -> None:
    with pytest.raises(UserError) as caught:
        check_context_parallel(*sizes)
    assert f"context_parallel_size {sizes[3]}" in caught.value.found and str(allowed) in caught.value.expected
    for size in allowed:
        check_context_parallel(*sizes[:3], size)


def test_shards_are_contiguous() -> None:
    assert [list(range(12))[shard_rows(12, 3, rank)] for rank in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    with pytest.raises(AssertionError, match="13 tokens over 3 ranks"):
        shard_rows(13, 3, 0)


def draw_inputs(heads: int, kv_heads: int) -> list[torch.Tensor]:
    """Query, key, value and a direction for the backward, whole row."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(TOKENS, n, HEAD_DIM, generator=generator) for n in (heads, kv_heads, kv_heads, heads)]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention over the whole row."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def run_shard(rank: int, cp_size: int, heads: int, kv_heads: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's heads after the exchange, and its rows of the output and of the gradients."""
    *inputs, direction = (x[shard_rows(TOKENS, cp_size, rank)].clone() for x in draw_inputs(heads, kv_heads))
    for x in inputs:
        x.requires_grad_()
    whole = exchange_to_heads(*inputs, dist.group.WORLD)
    output = exchange_to_tokens(attend(*whole), dist.group.WORLD)
    gradients = torch.autograd.grad(output, inputs, direction)
    return [x.detach() for x in whole], [output.detach(), *gradients]


@pytest.mark.parametrize(("heads", "kv_heads", "cp_size"), CASES)
def test_equals_one_rank(heads: int, kv_heads: int, cp_size: int) -> None:
    """The exchange gives each rank the heads of the plan, bitwise; outputs and gradients equal one rank's."""
    *inputs, direction = draw_inputs(heads, kv_heads)
    results = run_ranks(run_shard, cp_size, heads, kv_heads)
    plan = plan_heads(heads, kv_heads, cp_size)
    for rank, (whole, _) in enumerate(results):
        queries, keys = plan[rank]
        for found, x, mine in zip(whole, inputs, (queries, keys, keys), strict=True):
            assert torch.equal(found, x[:, list(mine)])
    for x in inputs:
        x.requires_grad_()
    output = attend(*inputs)
    expected = [output.detach(), *torch.autograd.grad(output, inputs, direction)]
    for i, want in enumerate(expected):
        torch.testing.assert_close(torch.cat([shard[i] for _, shard in results]), want, rtol=1e-5, atol=1e-6)


def count_sent(rank: int, cp_size: int, tokens_per_rank: int, heads: int, kv_heads: int) -> tuple[int, int, int]:
    """Calls and bytes handed to `all_to_all_single` in a forward, and bytes of a forward with its backward."""
    real, sent = dist.all_to_all_single, []

    def count(received: torch.Tensor, pieces: torch.Tensor, **options: object) -> object:
        sent.append(pieces.nbytes)
        return real(received, pieces, **options)

    dist.all_to_all_single = count
    inputs = [torch.randn(tokens_per_rank, n, HEAD_DIM, requires_grad=True) for n in (heads, kv_heads, kv_heads)]
    output = exchange_to_tokens(exchange_to_heads(*inputs, dist.group.WORLD)[0], dist.group.WORLD)
    calls, forward = len(sent), sum(sent)
    output.sum().backward()
    return calls, forward, sum(sent)


def test_bytes_per_rank_do_not_grow() -> None:
    """Twice the ranks for twice the tokens: the same bytes per rank, as documented; the backward sends as many."""
    sizes = dict(tokens_per_rank=6, heads=8, kv_heads=4)
    expected = 6 * (2 * 8 + 2 * 4) * HEAD_DIM * 4
    for cp_size in (2, 4):
        assert run_ranks(count_sent, cp_size, *sizes.values()) == [(2, expected, 2 * expected)] * cp_size


def test_copies_of_kv_heads_are_what_is_sent_more() -> None:
    assert run_ranks(count_sent, 4, 6, 8, 2) == [(2, 6 * (2 * 8 + 2 * 4) * HEAD_DIM * 4, 2 * 6 * 24 * HEAD_DIM * 4)] * 4


def combine(rank: int, cp_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks hold every cp_size-th place but the last one; the loss of all is the same function of all values."""
    index = torch.arange(rank, 5, cp_size)
    values = (index + 1.0).requires_grad_()
    combined = combine_shards(values, index, 6, dist.group.WORLD)
    (combined.sum() ** 2).backward()
    return combined.detach(), values.grad


def test_combined_values_and_their_gradients() -> None:
    """d (sum)^2 / dx = 2 * 15 for every value, once: not once per rank."""
    results = run_ranks(combine, 2)
    for combined, gradient in results:
        assert combined.tolist() == [1, 2, 3, 4, 5, 0] and set(gradient.tolist()) == {30.0}
