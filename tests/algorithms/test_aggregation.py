# SPDX-License-Identifier: Apache-2.0
"""Each aggregation mode against its definition as a loop, and independent of the split into microbatches."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.algorithms.aggregation import compute_sequence_weights
from megatron_rl.packing.microbatches import plan_microbatches

MAX_RESPONSE_LENGTH = 16
LENGTHS = [3, 16, 1, 7, 5]
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]


def make_losses(lengths: list[int]) -> list[list[float]]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=n).tolist() for n in lengths]


def aggregate_by_loop(mode: str, losses: list[list[float]]) -> float:
    """The definitions, word by word."""
    if mode == "token-mean":
        tokens = [loss for sequence in losses for loss in sequence]
        return sum(tokens) / len(tokens)
    total = 0.0
    for sequence in losses:
        if mode == "seq-mean-token-mean":
            total += sum(sequence) / len(sequence)
        elif mode == "seq-mean-token-sum":
            total += sum(sequence)
        elif mode == "constant":
            total += sum(sequence) / MAX_RESPONSE_LENGTH
    return total / len(losses)


@pytest.mark.parametrize("mode", MODES)
def test_mode_equals_its_definition(mode: str) -> None:
    losses = make_losses(LENGTHS)
    weights = compute_sequence_weights(mode, LENGTHS, MAX_RESPONSE_LENGTH)
    found = sum(w * loss for w, sequence in zip(weights, losses, strict=True) for loss in sequence)
    assert found == pytest.approx(aggregate_by_loop(mode, losses), rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dp_size", "max_tokens"), [(1, 16), (1, 100), (2, 16), (3, 20)])
def test_sum_is_independent_of_the_split(mode: str, dp_size: int, max_tokens: int) -> None:
    """Weights are made once for the minibatch; partial sums over any microbatches add up to the same loss.

    Does not cover the tensors of a batch (tests/packing/test_batch.py) nor real ranks (tests/training).
    """
    losses = make_losses(LENGTHS)
    weights = compute_sequence_weights(mode, LENGTHS, MAX_RESPONSE_LENGTH)
    plan = plan_microbatches(LENGTHS, dp_size=dp_size, max_tokens=max_tokens)
    parts = [sum(weights[i] * sum(losses[i]) for i in members) for rank in plan for members in rank]
    assert sum(parts) == pytest.approx(aggregate_by_loop(mode, losses), rel=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 8, 1 / 8, 0.0]),
        ("seq-mean-token-mean", [1 / 6, 1 / 18, 0.0]),
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 0.0]),
        ("constant", [1 / 48, 1 / 48, 0.0]),
    ],
)
def test_sequence_without_a_token_in_the_loss(mode: str, expected: list[float]) -> None:
    """It has weight 0, and it still counts as one of the three sequences."""
    np.testing.assert_allclose(compute_sequence_weights(mode, [2, 6, 0], MAX_RESPONSE_LENGTH), expected, rtol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_no_token_in_the_loss_at_all(mode: str) -> None:
    assert compute_sequence_weights(mode, [0, 0], MAX_RESPONSE_LENGTH).tolist() == [0.0, 0.0]


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'"):
        compute_sequence_weights("mean", LENGTHS, MAX_RESPONSE_LENGTH)
