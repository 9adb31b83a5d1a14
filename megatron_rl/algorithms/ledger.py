# SPDX-License-Identifier: Apache-2.0
"""Loss ledger: the denominators of an optimizer step, expected against used.

Expected counts come from response lengths, before anything is split; used ones from the losses. A mismatch reveals a
token that was dropped, repeated, or divided by a local count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megatron_rl.algorithms.aggregation import aggregate
from megatron_rl.types import LossLedger

_WEIGHT_TOLERANCE = 1e-4  # weights are summed in float32
_POLICY_TERMS = {"policy": "policy", "kl": "kl_term", "entropy": "entropy_term"}
_VALUE_TERMS = {"value": "loss"}


class LedgerError(RuntimeError):
    """The loss was not aggregated over the whole minibatch: a bug."""


def build_ledger(
    mode: str, response_lengths_in_loss: Sequence[int], max_response_length: int | float, options: Any = None
) -> LossLedger:
    """Compute the ledger of one minibatch.

    A fully masked response (length 0) still counts as a sequence, so it shrinks the loss in per-sequence modes. Modes
    from plugins have denominator 1.

    Args:
        mode: `algorithm.loss_agg_mode`.
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
    """Return the result of `check_ledger` as a 0-d bool tensor, without a device sync."""
    largest = weight_sum.abs().clamp(min=abs(ledger.weight_sum))
    same_weights = (weight_sum - ledger.weight_sum).abs() <= (_WEIGHT_TOLERANCE * largest).clamp(min=1e-12)
    return (tokens == ledger.num_tokens) & same_weights


def ledger_metrics(ledger: LossLedger, totals: Mapping[str, float], prefix: str = "ledger") -> dict[str, float]:
    """Return numerator and denominator of each loss term, named "<prefix>/<term>/...", and the aggregation's metrics.

    Args:
        totals: metrics of `compute_policy_loss` or `compute_value_loss`, summed over microbatches and ranks.
    """
    terms = _POLICY_TERMS if "policy" in totals else _VALUE_TERMS
    metrics = dict(ledger.metrics)
    for term, key in terms.items():
        metrics[f"{prefix}/{term}/numerator"] = totals[key] * ledger.denominator
        metrics[f"{prefix}/{term}/denominator"] = ledger.denominator
    return metrics
