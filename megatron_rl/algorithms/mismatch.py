# SPDX-License-Identifier: Apache-2.0
"""How far the trainer's log-probs are from the engine's for the same tokens and weights, and its correction.

With d = old_logprobs - rollout_logprobs and importance weight w = exp(d) per token:

    max, mean                of |d|
    k3                       mean of w - 1 - d, an estimate of KL(rollout || trainer)
    effective_sample_size    (sum w)^2 / (N sum w^2): 1 when all weights are equal
"""

from __future__ import annotations

import torch

from megatron_rl.algorithms.kl import MAX_LOG_RATIO
from megatron_rl.algorithms.segments import Responses
from megatron_rl.config.schema import AlgorithmConfig


def sum_mismatch(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[dict[str, float], float]:
    """Sums over this rank's tokens, to be added over DP ranks, and the maximum of |d|."""
    d = (old_logprobs - rollout_logprobs)[loss_mask].double()
    w = d.exp()
    sums = {"abs": d.abs().sum(), "k3": (torch.expm1(d) - d).sum(), "w": w.sum(), "w2": w.square().sum()}
    maximum = float(d.abs().max()) if len(d) else 0.0
    return {**{k: float(v) for k, v in sums.items()}, "tokens": float(d.numel())}, maximum


def finish_mismatch(sums: dict[str, float], maximum: float) -> dict[str, float]:
    """Metrics from the global sums and the global maximum."""
    tokens = max(sums["tokens"], 1.0)
    return {
        "mismatch/max": maximum,
        "mismatch/mean": sums["abs"] / tokens,
        "mismatch/k3": sums["k3"] / tokens,
        "mismatch/effective_sample_size": sums["w"] ** 2 / (tokens * sums["w2"]) if sums["w2"] else 1.0,
    }


def has_importance_weights(config: AlgorithmConfig) -> bool:
    """Whether a correction or a rejection is configured."""
    return config.importance_sampling not in ("none", "bypass") or config.reject_sequence_above is not None


@torch.no_grad()
def compute_importance_weights(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    responses: Responses,
    config: AlgorithmConfig,
) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """Weights of the policy-gradient term that correct for sampling with the engine's log-probs.

        token-truncate       min(w_t, high)                   truncated importance sampling (Yao et al., "Your efficient
                                                              RL framework secretly brings you off-policy", 2025)
        token-mask           w_t, or 0 outside [low, high]    IcePop (Ring-1T, 2025)
        sequence-truncate    min(w_i, high)                   w_i = exp(mean_t d_t), the geometric mean
        sequence-mask        w_i, or 0 outside [low, high]    over the tokens of the response in the loss
        product-truncate     min(w_i, high)                   w_i = exp(sum_t d_t), the ratio of the whole response:
        product-mask         w_i, or 0 outside [low, high]    without bias, of high variance; d_i within +-20

    `importance_normalize` (see `normalize_weights`) divides by the mean weight of the step, after truncation: over
    tokens, or over responses in the modes sequence and product; masked ones do not count in it.
    `reject_sequence_above` gives 0 to all tokens of a response that has one with a larger |d|, in any mode.
    Denominators of the loss stay as they are: a masked token counts in them as a token of loss 0, so that
    masking makes the step smaller instead of giving the rest more weight. KL and entropy terms are not weighted.
    With `bypass` the policy loss has `rollout_logprobs` in its ratio, and only a rejection gives weights.

    Args:
        old_logprobs, rollout_logprobs: [t]; what stands at masked positions does not matter.
        loss_mask: [t] bool, response tokens in the loss.
        responses: rollouts with all of their branches: each has one weight, or is rejected as a whole.
        config: `importance_sampling`, `importance_low`, `importance_high`, `reject_sequence_above`.

    Returns:
        [t] float32 weights, 0 outside the mask, and 0-d sums over this rank for `finish_importance_weights`; None
        and {} without `has_importance_weights`. No value is looked at on the host.
    """
    mode, threshold = config.importance_sampling, config.reject_sequence_above
    if not has_importance_weights(config):
        return None, {}
    gap = torch.where(loss_mask, old_logprobs - rollout_logprobs, 0.0)
    counts = responses.add_up(loss_mask)
    level, _, action = mode.partition("-")
    weights = _log_weights(level, gap, responses, counts).float().exp()
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


def _log_weights(level: str, gap: torch.Tensor, responses: Responses, counts: torch.Tensor) -> torch.Tensor:
    """Logarithms of the weights before they are truncated or masked, [t]."""
    if level == "sequence":
        return responses.add_up(gap) / counts.clamp(min=1)
    if level == "product":
        return responses.add_up(gap).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return gap if level == "token" else torch.zeros_like(gap)


def normalize_weights(weights: torch.Tensor, sums: dict[str, float]) -> torch.Tensor:
    """The weights over their mean, from the global sums; as they are where that is 0."""
    return weights * (sums["normal_count"] / sums["normal"]) if sums["normal"] > 0 else weights


def finish_importance_weights(sums: dict[str, float]) -> dict[str, float]:
    """Metrics from the global sums: fractions of tokens truncated and masked, of responses rejected, mean weight.

    The mean is that before weights are normalized. Empty for the empty sums of a run without correction.
    """
    if not sums:
        return {}
    tokens, sequences = max(sums["tokens"], 1.0), max(sums["sequences"], 1.0)
    return {
        "mismatch/truncated_fraction": sums["truncated"] / tokens,
        "mismatch/masked_fraction": sums["masked"] / tokens,
        "mismatch/rejected_fraction": sums["rejected"] / sequences,
        "mismatch/mean_weight": sums["weight"] / tokens,
    }
