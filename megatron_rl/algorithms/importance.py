# SPDX-License-Identifier: Apache-2.0
"""Importance weights, which correct for sampling with the engine's log-probs instead of the trainer's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_rl.algorithms.losses import MAX_LOG_RATIO, mark_first, number_segments, sum_per_segment
from megatron_rl.config.schema import AlgorithmConfig


@dataclass(frozen=True)
class Responses:
    """Assignment of the tokens of a packed [t] tensor to responses."""

    is_first: torch.Tensor  # [t] bool, one token of each response, on one rank
    add_up: Callable[[torch.Tensor], torch.Tensor]  # gives every token the sum over its response, [t] -> [t] float64

    @classmethod
    def of_sequences(cls, sequence_ids: torch.Tensor) -> Responses:
        """Build from sequence ids [t], with one response per sequence."""
        segments = number_segments(sequence_ids)
        return cls(mark_first(sequence_ids), lambda values: sum_per_segment(values, segments))


@torch.no_grad()
def compute_importance_weights(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    responses: Responses,
    config: AlgorithmConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute policy-gradient weights that correct for sampling with the engine's log-probs.

        token-truncate       min(w_t, high)                   truncated importance sampling (Yao et al., "Your efficient
                                                              RL framework secretly brings you off-policy", 2025)
        token-mask           w_t, or 0 outside [low, high]    IcePop (Ring-1T, 2025)
        sequence-truncate    min(w_i, high)                   w_i = exp(mean_t d_t), over the response's loss tokens
        sequence-mask        w_i, or 0 outside [low, high]
        product-truncate     min(w_i, high)                   w_i = exp(sum_t d_t), unbiased, of high variance;
        product-mask         w_i, or 0 outside [low, high]    the sum is bounded to +-20

    d_t = old_logprobs_t - rollout_logprobs_t, and w_t = exp(d_t). `reject_sequence_above` zeroes all weights of a
    response that has a larger |d_t|, in any mode; other weights are 1 in modes none and bypass. Masked tokens still
    count in the loss's denominators.

    Args:
        old_logprobs, rollout_logprobs: [t]; ignored at masked positions.
        responses: tokens of each rollout or branch (`importance_by`), which share a weight in modes sequence, product.

    Returns:
        [t] float32 weights, 0 outside the mask, and 0-d sums over this rank for `finish_importance_weights`. No device
        sync.
    """
    mode, threshold = config.importance_sampling, config.reject_sequence_above
    gap = torch.where(loss_mask, old_logprobs - rollout_logprobs, 0.0)
    counts = responses.add_up(loss_mask)
    level, _, action = mode.partition("-")
    log_weights = gap if level == "token" else torch.zeros_like(gap)
    if level == "sequence":
        log_weights = responses.add_up(gap) / counts.clamp(min=1)
    elif level == "product":
        log_weights = responses.add_up(gap).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights = log_weights.float().exp()
    nowhere = torch.zeros_like(loss_mask)
    is_truncated = weights > config.importance_high if action == "truncate" else nowhere
    is_masked = (weights < config.importance_low) | (weights > config.importance_high) if action == "mask" else nowhere
    is_rejected = nowhere if threshold is None else responses.add_up(gap.abs() > threshold) > 0
    weights = torch.where(is_truncated, config.importance_high, weights)
    is_first = responses.is_first & (counts > 0)
    counted = ~is_masked & (loss_mask if level == "token" else is_first)
    kept = torch.where(loss_mask & ~is_masked & ~is_rejected, weights, 0.0).float()
    return kept, {
        "tokens": loss_mask.sum(),
        "weight": kept.double().sum(),
        "truncated": (loss_mask & is_truncated).sum(),
        "masked": (loss_mask & is_masked).sum(),
        "sequences": is_first.sum(),
        "rejected": (is_first & is_rejected).sum(),
        "normal": torch.where(counted, weights, 0.0).double().sum(),
        "normal_count": counted.sum(),
    }


def normalize_weights(weights: torch.Tensor, sums: dict[str, float]) -> torch.Tensor:
    """Divide importance weights by their mean over the step; a mean of 0 changes nothing.

    `sums` has the sums of `compute_importance_weights` over all ranks. The mean excludes masked weights and is taken
    after truncation, over tokens, or over responses in modes sequence and product.
    """
    return weights * (sums["normal_count"] / sums["normal"]) if sums["normal"] > 0 else weights


def finish_importance_weights(sums: dict[str, float]) -> dict[str, float]:
    """Compute the fractions of truncated, masked and rejected weights, and their mean before normalization."""
    tokens, sequences = max(sums["tokens"], 1.0), max(sums["sequences"], 1.0)
    return {
        "mismatch/truncated_fraction": sums["truncated"] / tokens,
        "mismatch/masked_fraction": sums["masked"] / tokens,
        "mismatch/rejected_fraction": sums["rejected"] / sequences,
        "mismatch/mean_weight": sums["weight"] / tokens,
    }
