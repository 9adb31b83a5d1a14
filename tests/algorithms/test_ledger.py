# SPDX-License-Identifier: Apache-2.0
"""The ledger's counts by hand, against losses split over microbatches and ranks, and the faults it must find."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.algorithms.losses import (
    LedgerError,
    LossLedger,
    PolicyLossInputs,
    aggregate,
    build_ledger,
    check_ledger,
    compute_policy_loss,
    ledger_metrics,
)
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.training.roles.critic import compute_value_loss

MAX_RESPONSE_LENGTH = 16
LENGTHS = [3, 16, 0, 7, 5]  # the third is masked as a whole
MODES = ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]
CONFIG = AlgorithmConfig(kl_coef=0.5, entropy_coef=0.25)


@pytest.mark.parametrize(
    ("mode", "denominator", "weight_sum"),
    [
        ("token-mean", 31, 1.0),
        ("token-sum", 1, 31.0),
        ("seq-mean-token-mean", 5, 4 / 5),
        ("seq-mean-token-sum", 5, 31 / 5),
        ("constant", 80, 31 / 80),
    ],
)
def test_counts_by_hand(mode: str, denominator: float, weight_sum: float) -> None:
    """The sequence without a token counts among the sequences."""
    ledger = build_ledger(mode, LENGTHS, MAX_RESPONSE_LENGTH)
    assert ledger == LossLedger(mode, 31, 5, denominator, pytest.approx(weight_sum, rel=1e-12))


@pytest.mark.parametrize("mode", MODES)
def test_nothing_in_the_loss(mode: str) -> None:
    ledger = build_ledger(mode, [0, 0], MAX_RESPONSE_LENGTH)
    assert (ledger.num_tokens, ledger.weight_sum) == (0, 0.0) and ledger.denominator >= 1
    check_ledger(ledger, 0.0, 0.0)


def compute_totals(sequences: list[int], weights: np.ndarray) -> dict[str, float]:
    """Metrics of the policy loss of these sequences, float32, one microbatch per sequence, added up.

    Token losses of sequence i are -(i + 1), KL 1/2 * 2^2 = 2 and entropies 3 per token.
    """
    config, totals = AlgorithmConfig(**{**vars(CONFIG), "kl_type": "k2"}), {}
    for i in sequences:
        count = LENGTHS[i] + 2
        mask = torch.arange(count) >= 2
        zeros = torch.zeros(count)
        inputs = PolicyLossInputs(zeros, zeros, zeros + i + 1, mask, torch.full((count,), i))
        _, metrics = compute_policy_loss(inputs, zeros + 3, zeros + 2, None, float(weights[i]) * mask.float(), config)
        totals = {k: totals.get(k, 0.0) + float(v) for k, v in metrics.items()}
    return totals


def _totals_on_rank(rank: int, world_size: int, weights: np.ndarray) -> dict[str, float]:
    """Ranks hold unequal shares: the first one takes two sequences, the last one the rest."""
    mine = {1: [[0, 1, 2, 3, 4]], 2: [[1, 2], [0, 3, 4]], 3: [[3, 4], [2], [0, 1]]}[world_size][rank]
    totals = compute_totals(mine, weights)
    flat = torch.tensor(list(totals.values()), dtype=torch.float64)
    dist.all_reduce(flat)
    return dict(zip(totals, flat.tolist(), strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_losses_on_several_ranks_agree_with_the_ledger(mode: str, world_size: int) -> None:
    """And the quotients are the terms by their definitions, whatever the split."""
    ledger = build_ledger(mode, LENGTHS, MAX_RESPONSE_LENGTH)
    weights = aggregate(mode, LENGTHS, MAX_RESPONSE_LENGTH).weights
    [totals, *others] = run_ranks(_totals_on_rank, world_size, weights)
    assert all(other == totals for other in others)
    check_ledger(ledger, totals["tokens"], totals["weights"])
    metrics = ledger_metrics(ledger, totals)
    is_mean = mode == "seq-mean-token-mean"
    numerators = {
        "policy": sum(-(i + 1) * (1 if is_mean and n else n) for i, n in enumerate(LENGTHS)),
        "kl": 0.5 * 2 * (4 if is_mean else 31),
        "entropy": -0.25 * 3 * (4 if is_mean else 31),
    }
    assert metrics == pytest.approx(
        {
            **{f"ledger/{term}/numerator": x for term, x in numerators.items()},
            **{f"ledger/{term}/denominator": ledger.denominator for term in numerators},
        },
        rel=1e-5,
    )
    quotients = sum(metrics[f"ledger/{t}/numerator"] / metrics[f"ledger/{t}/denominator"] for t in numerators)
    assert quotients == pytest.approx(totals["loss"], rel=1e-5)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "token-sum"])
def test_a_local_denominator_is_found(mode: str) -> None:
    """Each of two ranks divides by its own count: tokens agree, the weights sum to another number."""
    ledger, totals = build_ledger(mode, LENGTHS, MAX_RESPONSE_LENGTH), {"tokens": 0.0, "weights": 0.0}
    for share in ([1, 2], [0, 3, 4]):
        weights = np.zeros(len(LENGTHS))
        weights[share] = aggregate(mode, [LENGTHS[i] for i in share], MAX_RESPONSE_LENGTH).weights
        local = compute_totals(share, weights)
        totals = {key: totals[key] + local[key] for key in totals}
    assert totals["tokens"] == ledger.num_tokens
    with pytest.raises(LedgerError, match=f"loss_agg_mode {mode}"):
        check_ledger(ledger, totals["tokens"], totals["weights"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("share", [[0, 1, 2, 3], [0, 1, 2, 3, 4, 4]], ids=["dropped", "repeated"])
def test_a_dropped_or_repeated_sequence_is_found(mode: str, share: list[int]) -> None:
    ledger = build_ledger(mode, LENGTHS, MAX_RESPONSE_LENGTH)
    totals = compute_totals(share, aggregate(mode, LENGTHS, MAX_RESPONSE_LENGTH).weights)
    with pytest.raises(LedgerError):
        check_ledger(ledger, totals["tokens"], totals["weights"])


def test_message_has_mode_expected_and_found() -> None:
    with pytest.raises(LedgerError, match="token-mean.* 31 tokens.* 5 sequences.* sum to 1,.* 30 tokens.* sum to 0.97"):
        check_ledger(build_ledger("token-mean", LENGTHS, MAX_RESPONSE_LENGTH), 30.0, 0.97)


@pytest.mark.parametrize(
    ("tokens", "weights", "agrees"),
    [
        (31.0, 1.00009, True),
        (31.0, 0.9998, False),
        (31.0, float("nan"), False),
        (32.0, 1.0, False),
        (30.999, 1.0, False),
    ],
)
def test_tolerances(tokens: float, weights: float, agrees: bool) -> None:
    """Tokens exactly, weights to 1e-4."""
    ledger = build_ledger("token-mean", LENGTHS, MAX_RESPONSE_LENGTH)
    if agrees:
        check_ledger(ledger, tokens, weights)
        return
    with pytest.raises(LedgerError):
        check_ledger(ledger, tokens, weights)


def test_value_term() -> None:
    """Errors of 2 at 31 tokens: a loss of 2 each."""
    ledger = build_ledger("token-mean", LENGTHS, MAX_RESPONSE_LENGTH)
    zeros, weights = torch.zeros(31), torch.full((31,), 1 / 31)
    _, metrics = compute_value_loss(zeros, zeros, zeros + 2, zeros == 0, weights, None)
    totals = {k: float(v) for k, v in metrics.items()}
    check_ledger(ledger, totals["tokens"], totals["weights"])
    assert ledger_metrics(ledger, totals) == pytest.approx(
        {"ledger/value/numerator": 62.0, "ledger/value/denominator": 31.0}, rel=1e-5
    )
