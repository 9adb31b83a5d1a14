# SPDX-License-Identifier: Apache-2.0
"""The books of the loss: what each optimizer step must have divided by, checked against what it did.

The ledger of a minibatch is made from the response lengths, which every rank knows, before anything is
split. The losses count tokens and weights where they use them. Summed over microbatches and ranks both
must agree: a token dropped, repeated, or divided by a local count shows at once.
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
    """The loss was not aggregated over what the minibatch holds: a bug, whose numbers are in the message."""


def build_ledger(
    mode: str, response_lengths_in_loss: Sequence[int], max_response_length: int | float, options: Any = None
) -> LossLedger:
    """Count one minibatch.

    A response whose tokens are all masked (length 0 here: truncated and masked) counts as one of the
    sequences and adds nothing to any sum: in the modes per sequence it makes the loss smaller, as a
    response with a loss of 0 would; token-mean does not notice it.

    The weights of a mode that a plugin registers have no denominator of their own: it is 1 in the ledger. Tokens and
    the sum of the weights are checked in every mode.

    Args:
        mode: `algorithm.loss_agg_mode`.
        response_lengths_in_loss: tokens in the loss of each response of the minibatch, over all ranks.
        max_response_length: the constant of mode "constant".
        options: of the mode, from `find_options`.
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
    """Compare what the losses counted, summed over microbatches and ranks, with the ledger.

    Args:
        ledger: of the minibatch.
        tokens: sum of the metric "tokens".
        weight_sum: sum of the metric "weights".

    Raises:
        LedgerError: tokens differ at all, or weights by more than 1e-4 of their sum.
    """
    same_weights = math.isclose(weight_sum, ledger.weight_sum, rel_tol=_WEIGHT_TOLERANCE, abs_tol=1e-12)
    if tokens != ledger.num_tokens or not same_weights:
        raise LedgerError(
            f"loss_agg_mode {ledger.mode}: the minibatch has {ledger.num_tokens} tokens in the loss in "
            f"{ledger.num_sequences} sequences and loss weights that sum to {ledger.weight_sum:.8g}, but the losses of "
            f"all microbatches and ranks counted {tokens:.15g} tokens and weights that sum to {weight_sum:.8g}"
        )


def is_ledger_met(ledger: LossLedger, tokens: torch.Tensor, weight_sum: torch.Tensor) -> torch.Tensor:
    """What `check_ledger` checks, for 0-d tensors and without waiting for a device: 0-d bool."""
    largest = weight_sum.abs().clamp(min=abs(ledger.weight_sum))
    same_weights = (weight_sum - ledger.weight_sum).abs() <= (_WEIGHT_TOLERANCE * largest).clamp(min=1e-12)
    return (tokens == ledger.num_tokens) & same_weights


def ledger_metrics(ledger: LossLedger, totals: Mapping[str, float], prefix: str = "ledger") -> dict[str, float]:
    """Numerator and denominator of each term of a loss; their quotient is the term as it entered the loss.

    Args:
        ledger: of the minibatch.
        totals: metrics of `compute_policy_loss` (terms policy, kl, entropy, with their coefficients) or of
            `compute_value_loss` (term value), summed over microbatches and ranks.
        prefix: first part of the names.

    Returns:
        {"<prefix>/<term>/numerator": ..., "<prefix>/<term>/denominator": ...} for each term, and the metrics of the
        aggregation.
    """
    terms = _POLICY_TERMS if "policy" in totals else _VALUE_TERMS
    metrics = dict(ledger.metrics)
    for term, key in terms.items():
        metrics[f"{prefix}/{term}/numerator"] = totals[key] * ledger.denominator
        metrics[f"{prefix}/{term}/denominator"] = ledger.denominator
    return metrics
