# SPDX-License-Identifier: Apache-2.0
"""KL(policy || reference) per token, and its adaptive coefficient, for runs with a reference.

Estimators: J. Schulman, "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.algorithms.plugin_types import MAX_LOG_RATIO
from megatron_rl.config.schema import AlgorithmConfig

_MAX_ERROR = 0.2


def compute_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kl_type: str) -> torch.Tensor:
    """Estimate the KL divergence per token, [t], with log r = ref_logprobs - logprobs.

        k1 = -log r            unbiased, high variance
        k2 = (log r)^2 / 2     biased, low variance
        k3 = r - 1 - log r     unbiased, low variance, never negative
        abs = |log r|          a distance, no estimate of the divergence

    Beyond log r = 20, k3 continues along its tangent in r, to avoid overflow.
    """
    log_ratio = ref_logprobs - logprobs
    if kl_type == "k1":
        return -log_ratio
    if kl_type == "k2":
        return 0.5 * log_ratio.square()
    if kl_type == "k3":
        bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
        return torch.expm1(bounded) + bounded.exp() * (log_ratio - bounded) - log_ratio
    if kl_type == "abs":
        return log_ratio.abs()
    raise ValueError(f"unknown kl_type {kl_type!r}")


class AdaptiveKL:
    """Proportional controller in log space (Ziegler et al., arXiv 1909.08593).

    error = clip(KL / target - 1, -0.2, 0.2)               KL in nats
    coef <- coef (1 + gain error)                          gain = min(num_responses / horizon, 1)
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, measured_kl: float, num_responses: int) -> None:
        """Raise the coefficient if the KL is above the target, lower it if below."""
        error = min(max(measured_kl / self.target - 1.0, -_MAX_ERROR), _MAX_ERROR)
        self.coef *= 1.0 + error * min(num_responses / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """Return the current coefficient."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the coefficient; an empty state changes nothing."""
        self.coef = state.get("coef", self.coef)


def measure_for_target(kl: np.ndarray, tokens: np.ndarray, config: AlgorithmConfig) -> float:
    """Return the KL to compare with `kl_target`: the mean over responses of each response's KL.

    With `kl_target_per` "token", a response's KL is divided by its number of loss tokens.

    Args:
        kl: [num_rollouts], summed over loss tokens.
        tokens: [num_rollouts], number of loss tokens.
    """
    return float(np.mean(kl / np.maximum(tokens, 1) if config.kl_target_per == "token" else kl))
