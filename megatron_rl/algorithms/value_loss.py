# SPDX-License-Identifier: Apache-2.0
"""The critic's loss, and the explained variance of its values."""

from __future__ import annotations

import torch

_CONSTANT = 1e-12  # relative to the mean square: below float32's resolution, returns are constant


def compute_value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_weights: torch.Tensor,
    value_clip: float | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the squared error with clipped values (PPO as in arXiv 2005.12729, section 3, item 1).

        loss = sum_t w_t max((V_t - R_t)^2, (clip(V_t, V_old - c, V_old + c) - R_t)^2) / 2

    Args:
        values: [t], differentiable.
        old_values: [t] before the update.
        returns: [t] targets.
        loss_mask: [t] bool; masked tokens are ignored.
        loss_weights: [t], 0 at masked positions.
        value_clip: c, or `None` for the plain squared error.

    Returns:
        The loss (scalar) and sums over tokens: "loss", "clipped" (tokens without gradient because of the clip),
        "tokens", "weights", and float64 moments of returns and of error = returns - old_values.
    """
    values, old_values, returns = (torch.where(loss_mask, x, 0.0) for x in (values, old_values, returns))
    square = (values - returns).square()
    is_clipped = torch.zeros_like(loss_mask)
    if value_clip is not None:
        # Not old + clamp(new - old), which would change the bits of values inside the bounds.
        bounded = torch.clamp(values, old_values - value_clip, old_values + value_clip)
        bounded_square = (bounded - returns).square()
        is_clipped, square = bounded_square > square, torch.maximum(square, bounded_square)
    loss = (loss_weights * torch.where(loss_mask, 0.5 * square, 0.0)).sum()

    with torch.no_grad():
        error = returns.double() - old_values.double()
        metrics = {
            "loss": loss.detach(),
            "clipped": is_clipped.sum().float(),
            "tokens": loss_mask.sum().float(),
            "weights": torch.where(loss_mask, loss_weights, 0.0).sum(),
            "returns": returns.double().sum(),
            "returns2": returns.double().square().sum(),
            "error": error.sum(),
            "error2": error.square().sum(),
        }
    return loss, metrics


def finish_explained_variance(sums: dict[str, float]) -> float:
    """Return 1 - Var(returns - old values) / Var(returns) from global sums; 0 if the returns do not vary."""
    tokens = max(sums["tokens"], 1.0)
    variance, error_variance = (sums[f"{name}2"] / tokens - (sums[name] / tokens) ** 2 for name in ("returns", "error"))
    if variance <= _CONSTANT * sums["returns2"] / tokens:
        return 0.0
    return 1.0 - max(error_variance, 0.0) / variance
