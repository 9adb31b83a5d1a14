# SPDX-License-Identifier: Apache-2.0
"""The policy's total loss: policy-gradient term, KL, entropy and distillation, with metrics; PPO's policy loss.

Also KL(policy || reference) per token (J. Schulman, "Approximating KL Divergence", 2020), and its adaptive coefficient.

`loss_weights` hold global denominators (`aggregation.py`): sums over microbatches and DP ranks give the optimizer
step's loss. All shapes, those of sums per packed sequence included, depend on t only, as CUDA
graphs require.

A policy loss returns the loss of each token, and whether its gradient is clipped; `policy_losses.py` has the further
ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron_rl.algorithms.catalog import (  # noqa: F401  plugins import the decorator from here
    POLICY_LOSSES,
    find_options,
    register_policy_loss,
)
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.types import UserError

MAX_LOG_RATIO = 20.0  # bound of exponentiated log-ratios: e^20 = 4.9e8 does not overflow float32, even squared


@dataclass(frozen=True)
class PolicyLossInputs:
    """Inputs of a policy loss for one microbatch, [t] each; sequences (branches of rollouts) are contiguous and whole.

    Attributes:
        logprobs: of the current policy, differentiable.
        old_logprobs: of the policy before the update.
        sequence_ids: int64; -1 on padding.
        chosen: bool, tokens picked by `choose_tokens`, or `None`.
        rollout_rows: int64, rows since the first row of the token's rollout, whose branches are one sequence of the
            loss then; `None`: each sequence is.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    sequence_ids: torch.Tensor
    chosen: torch.Tensor | None = None
    options: Any = None
    rollout_rows: torch.Tensor | None = None


def number_segments(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Number the runs of equal ids consecutively from 0, [t] int64; padding is a run of its own."""
    return sequence_ids.diff(prepend=sequence_ids[:1]).ne(0).cumsum(0)


def sum_per_segment(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Give every token the sum over its segment, [t] float64, because a GPU adds in arbitrary order."""
    sums = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    return sums.index_add(0, segments, values.double())[segments]


def mark_first(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Mark the first token of each run of equal ids, [t] bool."""
    return sequence_ids.diff(prepend=sequence_ids[:1] - 1).ne(0)


_SETTING = "algorithm.policy_loss"


def compute_policy_loss(
    inputs: PolicyLossInputs,
    entropy: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    importance_weights: torch.Tensor | None,
    loss_weights: torch.Tensor,
    config: AlgorithmConfig,
    divergence: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the configured policy loss with its KL, entropy and distillation terms.

        loss = sum_t w_t (importance_t policy_t + kl_coef KL_t - entropy_coef H_t + distillation.coef D_t)

    Args:
        inputs: values at masked positions are ignored.
        entropy, divergence: [t], differentiable; divergence from a teacher, or `None`.
        ref_logprobs: [t], or `None`; the KL term also needs `kl_in` = "loss".
        importance_weights: [t] from `compute_importance_weights`, or `None`.
        loss_weights: [t], 0 at masked positions.

    Returns:
        The loss (scalar), and metrics: weighted sums "loss", "policy", "kl_term", "entropy_term", "weights"; unweighted
        sums "kl", "entropy", "clipped", "clipped_low" (of ratios below 1), "tokens", "divergence" (if any) and
        "loss/<name>/<metric>"; the maximum "max/deviation" of |logprobs - old_logprobs|.

    Raises:
        UserError: unknown policy loss, or a plugin's result is not [t] tensors.
    """
    mask, tokens = inputs.loss_mask, _blank_masked(inputs)

    def weighted_sum(per_token: torch.Tensor) -> torch.Tensor:
        return (loss_weights * torch.where(mask, per_token, 0.0)).sum()

    token_loss, is_clipped, reported = _call_policy_loss(tokens, config)
    policy = weighted_sum(token_loss if importance_weights is None else token_loss * importance_weights)
    kl = nothing = torch.zeros_like(policy)
    if ref_logprobs is not None:
        kl = compute_kl(tokens.logprobs, torch.where(mask, ref_logprobs, 0.0), config.kl_type)
    kl_term = config.kl_coef * weighted_sum(kl) if config.kl_in == "loss" else nothing
    entropy_term = -config.entropy_coef * weighted_sum(entropy) if config.entropy_coef else nothing
    loss = policy + kl_term + entropy_term
    if divergence is not None:
        loss = loss + config.distillation.coef * weighted_sum(divergence)
        reported["divergence"] = torch.where(mask, divergence.detach(), 0.0).sum()
    with torch.no_grad():
        metrics = {
            "loss": loss.detach(),
            "policy": policy.detach(),
            "kl_term": kl_term.detach(),
            "entropy_term": entropy_term.detach(),
            "kl": kl.detach().sum(),
            "entropy": torch.where(mask, entropy, 0.0).sum(),
            "clipped": (mask & is_clipped).sum().float(),
            "clipped_low": (mask & is_clipped & (tokens.logprobs < tokens.old_logprobs)).sum().float(),
            "tokens": mask.sum().float(),
            "weights": weighted_sum(torch.ones_like(loss_weights)),
            "max/deviation": (tokens.logprobs - tokens.old_logprobs).abs().max(),
        }
    return loss, metrics | reported


@torch.no_grad()
def find_clipped(inputs: PolicyLossInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Return the tokens that the policy loss clips: [t] bool, False at masked positions."""
    _, is_clipped, _ = _call_policy_loss(_blank_masked(inputs), config)
    return inputs.loss_mask & is_clipped


def _blank_masked(inputs: PolicyLossInputs) -> PolicyLossInputs:
    """Zero the inputs at masked positions, so that garbage reaches neither a formula nor its gradient."""
    logprobs, old_logprobs, advantages = (
        torch.where(inputs.loss_mask, x, 0.0) for x in (inputs.logprobs, inputs.old_logprobs, inputs.advantages)
    )
    return replace(inputs, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)


def _call_policy_loss(
    inputs: PolicyLossInputs, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Call the configured policy loss and check its results: token losses, clipped mask, sums of metrics."""
    name, shape = config.policy_loss, list(inputs.loss_mask.shape)
    found = POLICY_LOSSES[name](replace(inputs, options=find_options(config, name)), config)
    parts: list[Any] = list(found) if isinstance(found, tuple) else [found]
    metrics = parts.pop() if len(parts) == 3 and isinstance(parts[2], dict) else {}
    if (
        len(parts) == 2
        and all(isinstance(part, torch.Tensor) and list(part.shape) == shape for part in (*parts, *metrics.values()))
        and parts[1].dtype == torch.bool
    ):
        sums = {
            f"loss/{name}/{metric}": torch.where(inputs.loss_mask, values.detach().float(), 0.0).sum()
            for metric, values in metrics.items()
        }
        return parts[0], parts[1], sums
    words = [*map(_describe, parts), *(f"{metric}: {_describe(values)}" for metric, values in metrics.items())]
    raise UserError(
        f'the policy loss "{name}" returned {", ".join(words) or "nothing"}',
        source=_SETTING,
        expected=f"a tuple of two tensors {shape}: the loss of each token, and whether it is clipped (bool); a third "
        "may be a dict of metrics, tensors of this shape",
        hint="return the loss of each token, not their mean: algorithm.loss_agg_mode aggregates it",
    )


def _describe(part: Any) -> str:
    is_tensor = isinstance(part, torch.Tensor)
    return f"{list(part.shape)} {part.dtype}".replace("torch.", "") if is_tensor else type(part).__name__


def compute_ppo_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the clipped surrogate per token (PPO, arXiv 1707.06347, eq. 7).

        ratio_t = exp(logprobs_t - old_logprobs_t)
        loss_t = -min(ratio_t A_t, clip(ratio_t, 1 - eps_low, 1 + eps_high) A_t)

    Unequal bounds are clip-higher (DAPO, arXiv 2503.14476, eq. 10); `dual_clip` also bounds the loss of negative
    advantages (arXiv 1912.09729).
    """
    return clip_surrogate(inputs.logprobs - inputs.old_logprobs, inputs.advantages, config, config.dual_clip)


def clip_surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig, dual_clip: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute PPO's clipped surrogate with optional dual clip, and whether the clip removes the gradient."""
    ratio = bounded_ratio(log_ratio)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - config.clip_eps_low, 1.0 + config.clip_eps_high) * advantages
    is_clipped, token_loss = clipped > unclipped, torch.maximum(unclipped, clipped)
    if dual_clip is not None:
        is_negative, highest = advantages < 0, -dual_clip * advantages
        is_clipped = is_clipped | (is_negative & (highest < token_loss))
        token_loss = torch.where(is_negative, torch.minimum(token_loss, highest), token_loss)
    return token_loss, is_clipped


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp of the log-ratio bounded to +-20: beyond, gradients would overflow to inf * 0 = nan."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


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


def has_importance_weights(config: AlgorithmConfig) -> bool:
    """Return whether the config demands importance weights or the rejection of responses."""
    return config.importance_sampling not in ("none", "bypass") or config.reject_sequence_above is not None
