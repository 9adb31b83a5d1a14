# SPDX-License-Identifier: Apache-2.0
"""The policy's total loss: policy-gradient term, KL, entropy and distillation, with metrics; PPO's policy loss.

`loss_weights` hold global denominators (`aggregation.py`): sums over microbatches and DP ranks give the optimizer
step's loss. Shapes depend on t only, for CUDA graphs.

A policy loss returns the loss of each token, and whether its gradient is clipped; `policy_losses.py` has the further
ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_rl.algorithms.catalog import (  # noqa: F401  plugins import the decorator from here
    POLICY_LOSSES,
    find_options,
    register_policy_loss,
)
from megatron_rl.algorithms.plugin_types import MAX_LOG_RATIO, PolicyLossInputs
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.types import UserError

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
        sums "kl", "entropy", "clipped", "tokens", "divergence" (if any) and "loss/<name>/<metric>"; the maximum
        "max/deviation" of |logprobs - old_logprobs|.

    Raises:
        UserError: unknown policy loss, or a plugin's result is not [t] tensors.
    """
    mask, tokens = inputs.loss_mask, _blank_masked(inputs)

    def weighted_sum(per_token: torch.Tensor) -> torch.Tensor:
        return (loss_weights * torch.where(mask, per_token, 0.0)).sum()

    token_loss, is_clipped, reported = _call_policy_loss(tokens, config)
    if importance_weights is not None:
        token_loss = token_loss * importance_weights
    policy = weighted_sum(token_loss)
    nothing = torch.zeros_like(policy)
    kl = nothing if ref_logprobs is None else _compute_kl(tokens, ref_logprobs, config.kl_type)
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
            "tokens": mask.sum().float(),
            "weights": weighted_sum(torch.ones_like(loss_weights)),
            "max/deviation": (tokens.logprobs - tokens.old_logprobs).abs().max(),
        }
    return loss, metrics | reported


def _compute_kl(inputs: PolicyLossInputs, ref_logprobs: torch.Tensor, kl_type: str) -> torch.Tensor:
    from megatron_rl.algorithms.kl import compute_kl

    return compute_kl(inputs.logprobs, torch.where(inputs.loss_mask, ref_logprobs, 0.0), kl_type)


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
