# SPDX-License-Identifier: Apache-2.0
"""Softmax over sets of tokens: values and gradients against a loop in float64, whole or split over TP ranks.

Not covered: the origin of the sets (tests/engines/test_truncation.py), and their transfer (tests/run/test_bitwise.py).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.parallel.chunked_divergence import compute_linear_sum_pi_squared
from megatron_rl.parallel.vocab_parallel import (
    OutputSoftmax,
    PackedKeptSets,
    compute_linear_logprobs_and_entropy,
)
from megatron_rl.types import KeptSets

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE, PADDED_SIZE, TEMPERATURE = 14, 8, 11, 16, 0.7
Inputs = tuple[torch.Tensor, torch.Tensor, list[list[int]], list[int], torch.Tensor]


def make_inputs(dtype: torch.dtype) -> Inputs:
    """Hidden states, weight, sets (all of the vocabulary at every fourth token), targets, weights of the outputs."""
    rng = np.random.default_rng(5)
    hidden, weight, weights = (
        torch.from_numpy(rng.standard_normal(size)).to(dtype)
        for size in ((NUM_TOKENS, HIDDEN_SIZE), (PADDED_SIZE, HIDDEN_SIZE), (2, NUM_TOKENS))
    )
    sets = [rng.permutation(VOCAB_SIZE)[: 1 + i % 6].tolist() if i % 4 else [] for i in range(NUM_TOKENS)]
    sets[1] = [2, 1]  # of the first rank alone
    targets = [rng.choice(found or VOCAB_SIZE) for found in sets]
    return hidden, weight, sets, targets, weights


def pack(sets: list[list[int]]) -> PackedKeptSets:
    counts = np.array([len(found) for found in sets], np.int32)
    ids = np.array([token for found in sets for token in found], np.int32)
    return PackedKeptSets.pack([KeptSets(ids, counts)], torch.device("cpu"))


def loop(dtype: torch.dtype, softcap: float | None) -> list[torch.Tensor]:
    """Log-probs, entropy, sums of squares, and the gradients of both inputs, in float64."""
    hidden, weight, sets, targets, weights = make_inputs(dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    rows = []
    for state, found, target in zip(hidden, sets, targets, strict=True):
        ids = found or list(range(VOCAB_SIZE))
        logits = weight[ids] @ state
        logits = logits if softcap is None else softcap * (logits / softcap).tanh()
        log_p = (logits / TEMPERATURE).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum()
        rows.append(torch.stack([log_p[ids.index(target)], entropy, log_p.exp().square().sum()]))
    logprobs, entropy, squares = torch.stack(rows, 1)
    (logprobs @ weights[0].double() + entropy @ weights[1].double()).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [logprobs.detach(), entropy.detach(), squares.detach(), hidden.grad, weight.grad]


def compute(
    rank: int, world_size: int, dtype: torch.dtype, chunk_tokens: int, softcap: float | None
) -> list[torch.Tensor]:
    hidden, weight, sets, targets, weights = make_inputs(dtype)
    hidden, weight = hidden.requires_grad_(), weight.chunk(world_size)[rank].clone().requires_grad_()
    softmax = OutputSoftmax(
        vocab_size=VOCAB_SIZE,
        temperature=TEMPERATURE,
        tp_group=dist.group.WORLD,
        chunk_tokens=chunk_tokens,
        softcap=softcap,
    )
    kept = pack(sets)
    logprobs, entropy = compute_linear_logprobs_and_entropy(hidden, weight, torch.tensor(targets), softmax, kept)
    (logprobs @ weights[0] + entropy @ weights[1]).backward()
    squares = compute_linear_sum_pi_squared(hidden, weight, softmax, kept)
    return [logprobs.detach(), entropy.detach(), squares, hidden.grad, weight.grad]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_values_and_gradients_are_those_of_the_sets(tp_size: int) -> None:
    """Some ranks have no token of a set, the last one of four has one column of the vocabulary only."""
    cases = [
        (dtype, chunk, cap) for dtype in (torch.float64, torch.float32) for chunk in (1, 5, 14) for cap in (None, 2.0)
    ]

    def on_rank(rank: int, world_size: int) -> list[list[torch.Tensor]]:
        return [compute(rank, world_size, *case) for case in cases]

    for (dtype, _, softcap), ranks in zip(
        cases, zip(*run_ranks(on_rank, tp_size, timeout=60), strict=True), strict=True
    ):
        for found in ranks:
            assert all(torch.equal(found[i], ranks[0][i]) for i in range(3))
        together = [*ranks[0][:3], sum(found[3] for found in ranks), torch.cat([found[4] for found in ranks])]
        digits = 1e-12 if dtype == torch.float64 else 1e-5
        for x, expected in zip(together, loop(dtype, softcap), strict=True):
            torch.testing.assert_close(x, expected, rtol=digits, atol=digits, check_dtype=False)


def test_sets_of_everything_change_no_bit() -> None:
    """Tokens without a set, and those whose set is the vocabulary."""

    def on_rank(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        hidden, weight, _, targets, _ = make_inputs(torch.float32)
        softmax = OutputSoftmax(vocab_size=VOCAB_SIZE, temperature=0.7, tp_group=dist.group.WORLD, chunk_tokens=4)
        everything = [[] if i % 2 else list(range(VOCAB_SIZE)) for i in range(NUM_TOKENS)]
        return [
            compute_linear_logprobs_and_entropy(hidden, weight, torch.tensor(targets), softmax, kept)
            for kept in (None, pack(everything), pack([[]] * NUM_TOKENS))
        ]

    ((plain, *others),) = run_ranks(on_rank, 1)
    for found in others:
        assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])


def test_rows_are_chosen_and_padded() -> None:
    """Sets follow their rows in any order; those that are added have the whole vocabulary."""
    chosen = pack([[3, 1], [], [7], [2, 4, 5]])[torch.tensor([3, 1, 0])][1:].pad(1)
    assert chosen.counts.tolist() == [0, 2, 0]
    places = [
        chosen.ids[first : first + count].tolist() for first, count in zip(chosen.firsts, chosen.counts, strict=True)
    ]
    assert places == [[], [3, 1], []]
