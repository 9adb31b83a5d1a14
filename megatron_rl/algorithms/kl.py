# SPDX-License-Identifier: Apache-2.0
"""Per-token estimators of KL(policy || reference) from samples of the policy.

Source: J. Schulman, "Approximating KL Divergence" (2020), with log r = ref_logprobs - logprobs.
"""

from __future__ import annotations

import torch


def compute_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kl_type: str) -> torch.Tensor:
    """Estimate the KL divergence per token, [t].

        k1 = -log r            unbiased, high variance
        k2 = (log r)^2 / 2     biased, low variance
        k3 = r - 1 - log r     unbiased, low variance, never negative
    """
    log_ratio = ref_logprobs - logprobs
    if kl_type == "k1":
        return -log_ratio
    if kl_type == "k2":
        return 0.5 * log_ratio.square()
    if kl_type == "k3":
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"unknown kl_type {kl_type!r}")
