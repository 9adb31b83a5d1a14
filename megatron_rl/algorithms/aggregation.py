# SPDX-License-Identifier: Apache-2.0
"""Loss aggregation: one weight per sequence, so that a loss is `sum(weight * token loss)`; and its ledger.

Denominators are global, so the loss does not depend on microbatches and DP ranks. A sequence without tokens in the loss
still counts in `num_seqs`.

The ledger of an optimizer step compares the denominators expected from the response lengths with the denominators that
the losses counted. A mismatch reveals a token that was dropped, repeated, or divided by a local count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron_rl.algorithms.catalog import (  # noqa: F401  plugins import the decorator from here
    LOSS_AGGREGATIONS,
    register_loss_aggregation,
)
from megatron_rl.types import LossLedger, UserError


@dataclass(frozen=True)
class AggregationInputs:
    """Inputs of an aggregation, over all ranks of one minibatch."""

    lengths: np.ndarray  # [num_seqs] float64, tokens in the loss of each rollout; 0 if fully masked
    max_response_length: int | float  # `algorithm.loss_scale_factor`, or `data.max_response_length`
    options: Any = None


@dataclass(frozen=True)
class SequenceWeights:
    """Output of an aggregation."""

    weights: np.ndarray  # [num_seqs] float64 weight of each token of a sequence; 0 without tokens in the loss
    metrics: Mapping[str, float] = field(default_factory=dict)


def weigh_token_mean(inputs: AggregationInputs) -> np.ndarray:
    """Return 1 / sum_j len_j (DAPO, arXiv 2503.14476)."""
    return np.full(len(inputs.lengths), 1.0 / max(inputs.lengths.sum(), 1.0))


def weigh_token_sum(inputs: AggregationInputs) -> np.ndarray:
    """Return 1."""
    return np.ones(len(inputs.lengths))


def weigh_seq_mean_token_mean(inputs: AggregationInputs) -> np.ndarray:
    """Return 1 / (num_seqs * len_i) (GRPO, arXiv 2402.03300)."""
    return 1.0 / (len(inputs.lengths) * np.maximum(inputs.lengths, 1.0))


def weigh_seq_mean_token_sum(inputs: AggregationInputs) -> np.ndarray:
    """Return 1 / num_seqs."""
    return np.full(len(inputs.lengths), 1.0 / len(inputs.lengths))


def weigh_constant(inputs: AggregationInputs) -> np.ndarray:
    """Return 1 / (num_seqs * max_response_length) (Dr. GRPO, arXiv 2503.20783)."""
    return np.full(len(inputs.lengths), 1.0 / (len(inputs.lengths) * inputs.max_response_length))


def aggregate(
    mode: str, response_lengths: Sequence[int] | np.ndarray, max_response_length: int | float, options: Any = None
) -> SequenceWeights:
    """Compute the token weight of each sequence of one minibatch.

    Args:
        response_lengths: tokens in the loss per sequence of the global minibatch.
        max_response_length: the constant of mode "constant".

    Raises:
        UserError: unknown mode, or a plugin's weights are not finite or not one per sequence.
    """
    lengths = np.asarray(response_lengths, np.float64)
    found = LOSS_AGGREGATIONS[mode](AggregationInputs(lengths, max_response_length, options))
    weights, metrics = found if isinstance(found, tuple) else (found, {})
    weights = np.asarray(weights)
    if weights.shape != lengths.shape or not (weights.dtype.kind in "fiu" and np.isfinite(weights).all()):
        raise UserError(
            f'the aggregation "{mode}" returned {weights.dtype} {list(weights.shape)}: {weights}',
            source="algorithm.loss_agg_mode",
            expected=f"a finite weight for each of {len(lengths)} sequences",
            hint="return one number per entry of inputs.lengths, and divide by no length that may be 0",
        )
    return SequenceWeights(
        np.where(lengths > 0, weights.astype(np.float64), 0.0), {name: float(value) for name, value in metrics.items()}
    )


_WEIGHT_TOLERANCE = 1e-4  # weights are summed in float32
_TERMS = {"policy": "policy", "kl": "kl_term", "entropy": "entropy_term"}


class LedgerError(RuntimeError):
    """Error of a loss that was not aggregated over the whole minibatch: a bug."""


def build_ledger(
    mode: str, response_lengths_in_loss: Sequence[int], max_response_length: int | float, options: Any = None
) -> LossLedger:
    """Compute the counts and the weight sum that the losses of one minibatch must match.

    A fully masked response (length 0) still counts as a sequence. Modes from plugins have denominator 1.

    Args:
        response_lengths_in_loss: tokens in the loss per response of the global minibatch.
        max_response_length: the constant of mode "constant".
    """
    lengths = np.asarray(response_lengths_in_loss, np.int64)
    found = aggregate(mode, lengths, max_response_length, options)
    num_tokens, num_sequences = int(lengths.sum()), len(lengths)
    denominators = {
        "token-mean": max(num_tokens, 1),
        "seq-mean-token-mean": num_sequences,
        "seq-mean-token-sum": num_sequences,
        "constant": num_sequences * max_response_length,
    }
    metrics = {f"aggregation/{mode}/{name}": value for name, value in found.metrics.items()}
    return LossLedger(
        mode, num_tokens, num_sequences, float(denominators.get(mode, 1.0)), float(found.weights @ lengths), metrics
    )


def check_ledger(ledger: LossLedger, tokens: float, weight_sum: float) -> None:
    """Compare the tokens and weights that the losses of all microbatches and ranks counted with the ledger.

    Raises:
        LedgerError: token counts differ, or weight sums differ by more than 1e-4 (relative).
    """
    same_weights = math.isclose(weight_sum, ledger.weight_sum, rel_tol=_WEIGHT_TOLERANCE, abs_tol=1e-12)
    if tokens != ledger.num_tokens or not same_weights:
        raise LedgerError(
            f"loss_agg_mode {ledger.mode}: the minibatch has {ledger.num_tokens} tokens in the loss in "
            f"{ledger.num_sequences} sequences and loss weights that sum to {ledger.weight_sum:.8g}, but the losses of "
            f"all microbatches and ranks counted {tokens:.15g} tokens and weights that sum to {weight_sum:.8g}"
        )


def is_ledger_met(ledger: LossLedger, tokens: torch.Tensor, weight_sum: torch.Tensor) -> torch.Tensor:
    """Return whether `check_ledger` would pass, as a 0-d bool tensor, without a device sync."""
    largest = weight_sum.abs().clamp(min=abs(ledger.weight_sum))
    same_weights = (weight_sum - ledger.weight_sum).abs() <= (_WEIGHT_TOLERANCE * largest).clamp(min=1e-12)
    return (tokens == ledger.num_tokens) & same_weights


def ledger_metrics(ledger: LossLedger, totals: Mapping[str, float]) -> dict[str, float]:
    """Return numerator and denominator of each loss term, named "ledger/<term>/...", and the aggregation's metrics.

    Args:
        totals: metrics of `compute_policy_loss` or `compute_value_loss`, summed over microbatches and ranks.
    """
    metrics = dict(ledger.metrics)
    for term, key in (_TERMS if "policy" in totals else {"value": "loss"}).items():
        metrics[f"ledger/{term}/numerator"] = totals[key] * ledger.denominator
        metrics[f"ledger/{term}/denominator"] = ledger.denominator
    return metrics
