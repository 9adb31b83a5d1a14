# SPDX-License-Identifier: Apache-2.0
"""Loss aggregation: one weight per sequence, so that a loss is `sum(weight * token loss)`.

Denominators are global, so the loss does not depend on microbatches and DP ranks. A sequence without tokens in the loss
still counts in `num_seqs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_rl.algorithms.catalog import (  # noqa: F401  plugins import the decorator from here
    find_loss_aggregation,
    register_loss_aggregation,
)
from megatron_rl.algorithms.plugin_types import AggregationInputs, SequenceWeights
from megatron_rl.types import UserError


def weigh_token_mean(inputs: AggregationInputs) -> np.ndarray:
    """Return 1 / sum_j len_j (DAPO, arXiv 2503.14476)."""
    return np.full(len(inputs.lengths), 1.0 / max(inputs.lengths.sum(), 1.0))


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
    found = find_loss_aggregation(mode)(AggregationInputs(lengths, max_response_length, options))
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
