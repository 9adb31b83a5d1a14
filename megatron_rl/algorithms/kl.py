# SPDX-License-Identifier: Apache-2.0
"""KL(policy || reference): estimators per token from samples of the policy, and the coefficient of the KL term.

Source of the estimators: J. Schulman, "Approximating KL Divergence" (2020), with
log r = ref_logprobs - logprobs.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.config.schema import AlgorithmConfig

MAX_LOG_RATIO = 20.0  # where exponents of log-ratios end: e^20 = 4.9e8 is far from overflow, also when squared
_MAX_ERROR = 0.2


def compute_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kl_type: str) -> torch.Tensor:
    """Estimate the KL divergence per token, [t].

        k1 = -log r            unbiased, high variance
        k2 = (log r)^2 / 2     biased, low variance
        k3 = r - 1 - log r     unbiased, low variance, never negative
        abs = |log r|          a distance, no estimate of the divergence

    Beyond log r = 20 k3 continues as a straight line (r as its tangent there): value and gradient stay finite and
    keep their direction, where float32 would overflow at log r = 89. The gradient on the log-prob, 1 - r, is at most
    e^20 in size.

    The divergence of the whole distributions ("full" in verl, which does not implement it) needs the logits of both
    models at once and is not offered.
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


@torch.no_grad()
def compute_kl_penalty(
    old_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, loss_mask: torch.Tensor, kl_type: str
) -> torch.Tensor:
    """KL per token for the reward (`kl_in` = "reward"): no gradient, no coefficient, [t], 0 outside the mask.

    Its sum over a response with k1 is the usual estimate of the KL of the response.
    """
    return torch.where(loss_mask, compute_kl(old_logprobs, ref_logprobs, kl_type), 0.0)


class KLController:
    """The coefficient of the KL term along a run: this one keeps the configured one, also after a resume.

    Attributes:
        coef: current coefficient.
    """

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, measured_kl: float, num_responses: int) -> None:
        """React to the KL measured on this step's responses, in the unit of the target."""

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs; nothing here, as the config says it all."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved state; a run resumed with a fixed coefficient uses that of its config."""


class AdaptiveKL(KLController):
    """Proportional controller in log space (Ziegler et al., arXiv 1909.08593).

        error = clip(KL / target - 1, -0.2, 0.2)
        coef <- coef (1 + gain error)              gain = min(num_responses / horizon, 1)

    The paper's gain is 0.1 per batch; with the horizon of its code the size of the batch does not matter.
    One update never moves the coefficient by more than a fifth.

    Args:
        coef: first coefficient.
        target: KL to aim at, in nats.
        horizon: responses over which it acts.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        super().__init__(coef)
        self.target, self.horizon = target, horizon

    def update(self, measured_kl: float, num_responses: int) -> None:
        """Raise the coefficient when the KL is above the target, lower it when below."""
        error = min(max(measured_kl / self.target - 1.0, -_MAX_ERROR), _MAX_ERROR)
        self.coef *= 1.0 + error * min(num_responses / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """The current coefficient."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the saved coefficient; the state of a run with a fixed one has none and changes nothing."""
        self.coef = state.get("coef", self.coef)


def measure_for_target(kl: np.ndarray, tokens: np.ndarray, config: AlgorithmConfig) -> float:
    """What `kl_target` is compared with: the mean over responses of their KL, or of their KL per token.

    Args:
        kl: [num_rollouts], summed over the tokens in the loss.
        tokens: [num_rollouts], how many these are.
        config: `kl_target_per`.
    """
    return float(np.mean(kl / np.maximum(tokens, 1) if config.kl_target_per == "token" else kl))


def build_kl_controller(config: AlgorithmConfig) -> KLController:
    """The controller that `kl_controller` names, starting at `kl_coef`."""
    if config.kl_controller == "adaptive":
        return AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)
    return KLController(config.kl_coef)
