# SPDX-License-Identifier: Apache-2.0
"""Policy losses: the formula per token, and what is logged about it.

A loss returns the sum of `loss_weights * token loss`: the denominator is already in the weights
(`aggregation.py`), so sums over microbatches and DP ranks give the loss of the optimizer step.
"""

from __future__ import annotations

import torch

from megatron_rl.algorithms.kl import compute_kl
from megatron_rl.config.schema import AlgorithmConfig


def compute_policy_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_weights: torch.Tensor,
    config: AlgorithmConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate (PPO, arXiv 1707.06347, eq. 7) with KL and entropy terms.

        ratio = exp(logprobs - old_logprobs)
        surrogate = min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = sum_t w_t (-surrogate + kl_coef KL_t - entropy_coef H_t)

    Args:
        logprobs, entropy: [t] of the current policy, differentiable.
        old_logprobs, advantages, loss_weights: [t].
        ref_logprobs: [t], or None without a KL term.
        loss_mask: [t] bool; masked tokens enter nothing.

    Returns:
        The loss (scalar) and sums over tokens: "loss", "kl", "entropy", "clipped", "tokens", and the
        maximum "max/deviation" of |logprobs - old_logprobs|.
    """
    log_ratio = torch.where(loss_mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - config.clip_eps_low, 1.0 + config.clip_eps_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    token_loss = -surrogate
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * entropy
    kl = torch.zeros_like(logprobs)
    if ref_logprobs is not None:
        kl = compute_kl(logprobs, torch.where(loss_mask, ref_logprobs, logprobs.detach()), config.kl_type)
        token_loss = token_loss + config.kl_coef * kl
    loss = (loss_weights * torch.where(loss_mask, token_loss, 0.0)).sum()

    with torch.no_grad():
        is_clipped = loss_mask & (clipped * advantages < ratio * advantages)
        metrics = {
            "loss": loss.detach(),
            "kl": (kl * loss_mask).sum(),
            "entropy": torch.where(loss_mask, entropy, 0.0).sum(),
            "clipped": is_clipped.sum().float(),
            "tokens": loss_mask.sum().float(),
            "max/deviation": log_ratio.abs().max(),
        }
    return loss, metrics


def compute_sft_loss(
    logprobs: torch.Tensor, loss_mask: torch.Tensor, loss_weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative log-likelihood of the response tokens: `sum_t w_t (-logprobs_t)`."""
    loss = -(loss_weights * torch.where(loss_mask, logprobs, 0.0)).sum()
    return loss, {"loss": loss.detach(), "tokens": loss_mask.sum().float()}
