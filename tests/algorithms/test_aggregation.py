# SPDX-License-Identifier: Apache-2.0
"""Each aggregation mode against its definition as a loop, and independent of the split into microbatches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from megatron_rl.algorithms.losses import (
    AggregationInputs,
    LedgerError,
    aggregate,
    build_ledger,
    check_ledger,
    find_options,
    ledger_metrics,
    register_loss_aggregation,
)
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.samples.microbatches import plan_microbatches
from megatron_rl.types import UserError

MAX_RESPONSE_LENGTH = 16
LENGTHS = [3, 16, 1, 7, 5]
MODES = ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]


def make_losses(lengths: list[int]) -> list[list[float]]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=n).tolist() for n in lengths]


def aggregate_by_loop(mode: str, losses: list[list[float]]) -> float:
    """Aggregate token losses by a mode's definition, in a loop."""
    if mode.startswith("token"):
        tokens = [loss for sequence in losses for loss in sequence]
        return sum(tokens) / (len(tokens) if mode == "token-mean" else 1)
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
    weights = aggregate(mode, LENGTHS, MAX_RESPONSE_LENGTH).weights
    found = sum(w * loss for w, sequence in zip(weights, losses, strict=True) for loss in sequence)
    assert found == pytest.approx(aggregate_by_loop(mode, losses), rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dp_size", "max_tokens"), [(1, 16), (1, 100), (2, 16), (3, 20)])
def test_sum_is_independent_of_the_split(mode: str, dp_size: int, max_tokens: int) -> None:
    """Weights are made once for the minibatch; partial sums over any microbatches add up to the same loss.

    Does not cover the tensors of a batch (tests/samples/test_batch.py) nor real ranks (tests/training).
    """
    losses = make_losses(LENGTHS)
    weights = aggregate(mode, LENGTHS, MAX_RESPONSE_LENGTH).weights
    plan = plan_microbatches(LENGTHS, dp_size=dp_size, max_tokens=max_tokens)
    parts = [sum(weights[i] * sum(losses[i]) for i in members) for rank in plan for members in rank]
    assert sum(parts) == pytest.approx(aggregate_by_loop(mode, losses), rel=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 8, 1 / 8, 0.0]),
        ("token-sum", [1.0, 1.0, 0.0]),
        ("seq-mean-token-mean", [1 / 6, 1 / 18, 0.0]),
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 0.0]),
        ("constant", [1 / 48, 1 / 48, 0.0]),
    ],
)
def test_sequence_without_a_token_in_the_loss(mode: str, expected: list[float]) -> None:
    """It has weight 0, and it still counts as one of the three sequences."""
    np.testing.assert_allclose(aggregate(mode, [2, 6, 0], MAX_RESPONSE_LENGTH).weights, expected, rtol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_no_token_in_the_loss_at_all(mode: str) -> None:
    assert aggregate(mode, [0, 0], MAX_RESPONSE_LENGTH).weights.tolist() == [0.0, 0.0]


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(UserError, match='"token-maen" is not known(.|\n)*did you mean "token-mean"'):
        aggregate("token-maen", LENGTHS, MAX_RESPONSE_LENGTH).weights


@dataclass(frozen=True)
class PowerOptions:
    power: float = 0.5


@pytest.mark.usefixtures("registry")
def test_an_aggregation_of_the_user() -> None:
    """Its options, its metrics, and a ledger that checks it: a sequence without a token gets no weight."""

    @register_loss_aggregation("power", options=PowerOptions)
    def weigh(inputs: AggregationInputs) -> tuple[np.ndarray, dict[str, float]]:
        scale = np.maximum(inputs.lengths, 1) ** -inputs.options.power / inputs.max_response_length
        return scale, {"largest": scale.max()}

    config = AlgorithmConfig(options={"power": PowerOptions(2.0)})
    for options, power in ((find_options(config, "power"), 2.0), (find_options(AlgorithmConfig(), "power"), 0.5)):
        found = aggregate("power", [4, 0, 16], 8, options)
        np.testing.assert_allclose(found.weights, [4.0**-power / 8, 0.0, 16.0**-power / 8])
        assert found.metrics == {"largest": 1 / 8}
        ledger = build_ledger("power", [4, 0, 16], 8, options)
        weight_sum = (4 * 4.0**-power + 16 * 16.0**-power) / 8
        assert (ledger.num_tokens, ledger.denominator) == (20, 1.0) and ledger.weight_sum == pytest.approx(weight_sum)
        check_ledger(ledger, 20, weight_sum)
        with pytest.raises(LedgerError):
            check_ledger(ledger, 20, 1.01 * weight_sum)
        totals = {"policy": 3.0, "kl_term": 0.0, "entropy_term": 0.0}
        metrics = ledger_metrics(ledger, totals)
        assert metrics["ledger/policy/numerator"] == 3.0 and metrics["aggregation/power/largest"] == 1 / 8


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("result", [1.0, np.ones(2), [1.0, float("nan"), 1.0], ["a", "b", "c"], None])
def test_weights_of_the_user_that_are_none_are_refused(result: object) -> None:
    register_loss_aggregation("odd")(lambda inputs: result)
    with pytest.raises(UserError, match='the aggregation "odd" returned(.|\n)*for each of 3 sequences'):
        aggregate("odd", [1, 2, 3], MAX_RESPONSE_LENGTH).weights
