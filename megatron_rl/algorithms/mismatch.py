# SPDX-License-Identifier: Apache-2.0
"""How far the trainer's log-probs are from the engine's for the same tokens and weights.

With d = old_logprobs - rollout_logprobs and importance weight w = exp(d) per token:

    max, mean                of |d|
    k3                       mean of w - 1 - d, an estimate of KL(rollout || trainer)
    effective_sample_size    (sum w)^2 / (N sum w^2): 1 when all weights are equal
"""

from __future__ import annotations

import torch


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
