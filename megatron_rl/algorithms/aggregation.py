# SPDX-License-Identifier: Apache-2.0
"""Loss aggregation: one weight per sequence, so that a loss is `sum(weight * token loss)`.

The denominators are global: over all sequences of the minibatch, whatever microbatch or DP rank they
are on. The loss is therefore the same for every split. A sequence without a token in the loss still counts as
one of `num_seqs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def compute_sequence_weights(
    mode: str, response_lengths: Sequence[int] | np.ndarray, max_response_length: int
) -> np.ndarray:
    """Weight of each response token of each sequence of one minibatch.

        token-mean            1 / sum_j len_j                (DAPO, arXiv 2503.14476)
        seq-mean-token-mean   1 / (num_seqs * len_i)         (GRPO, arXiv 2402.03300)
        seq-mean-token-sum    1 / num_seqs
        constant              1 / (num_seqs * max_response_length)   (Dr. GRPO, arXiv 2503.20783)

    Args:
        mode: one of the names above.
        response_lengths: tokens in the loss, per sequence of the minibatch (global).
        max_response_length: the constant of the last mode.

    Returns:
        [num_seqs] float64; 0 for sequences without a token in the loss.
    """
    lengths = np.asarray(response_lengths, np.float64)
    num_seqs = len(lengths)
    if mode == "token-mean":
        weights = np.full(num_seqs, 1.0 / max(lengths.sum(), 1.0))
    elif mode == "seq-mean-token-mean":
        weights = 1.0 / (num_seqs * np.maximum(lengths, 1.0))
    elif mode == "seq-mean-token-sum":
        weights = np.full(num_seqs, 1.0 / num_seqs)
    elif mode == "constant":
        weights = np.full(num_seqs, 1.0 / (num_seqs * max_response_length))
    else:
        raise ValueError(f"unknown loss_agg_mode {mode!r}")
    return np.where(lengths > 0, weights, 0.0)
