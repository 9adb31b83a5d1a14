# SPDX-License-Identifier: Apache-2.0
"""The policy-gradient terms that come with the package: the loss of each token and where its gradient is cut.

Each gets 0 for everything at masked positions (`losses.py`). With logprobs == old_logprobs all ratios are
exactly 1, and every loss here has the gradient of -A * logprob.
"""

from __future__ import annotations

import torch

from megatron_rl.algorithms.losses import PolicyLossInputs
from megatron_rl.algorithms.segments import number_segments, sum_per_segment
from megatron_rl.config.schema import AlgorithmConfig

# A ratio of e^20 is clipped by any setting; beyond, its gradient would overflow to inf * 0 = nan where it is cut.
_MAX_LOG_RATIO = 20.0


def compute_ppo_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate per token (PPO, arXiv 1707.06347, eq. 7).

        ratio_t = exp(logprobs_t - old_logprobs_t)
        loss_t = -min(ratio_t A_t, clip(ratio_t, 1 - eps_low, 1 + eps_high) A_t)

    Different bounds are clip-higher (DAPO, arXiv 2503.14476, eq. 10); `dual_clip` bounds the loss of negative
    advantages as well (arXiv 1912.09729).
    """
    return _clip_surrogate(inputs.logprobs - inputs.old_logprobs, inputs.advantages, config)


def compute_gspo_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate with one ratio per sequence (GSPO, arXiv 2507.18071, eq. 7 and 14).

        s_i = exp(mean_t (logprobs_t - old_logprobs_t))             over the tokens in the loss
        s_it = sg[s_i] * exp(logprobs_t - sg[logprobs_t])           worth s_i
        loss_t = -min(s_it A_t, clip(s_it, 1 - eps_low, 1 + eps_high) A_t)

    Averaged over the tokens of a sequence (seq-mean-token-mean) value and gradient are those of
    -min(s_i A_i, clip(s_i) A_i): every token carries its own share of the gradient of s_i. `dual_clip` works on s_i.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    segments = number_segments(inputs.sequence_ids)
    with torch.no_grad():
        count = sum_per_segment(inputs.loss_mask, segments).clamp(min=1)
        mean = (sum_per_segment(log_ratio, segments) / count).to(log_ratio.dtype)
    return _clip_surrogate(mean + (inputs.logprobs - inputs.logprobs.detach()), inputs.advantages, config)


def compute_cispo_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped importance weight times log-prob (CISPO, arXiv 2506.13585, eq. 4 and 5).

        loss_t = -sg[clip(ratio_t, 1 - eps_low, 1 + eps_high)] A_t logprobs_t

    No token loses its gradient; clipped are those whose weight is. The paper leaves out the lower bound, which
    is eps_low = 1 here (or close to it).
    """
    ratio = (inputs.logprobs.detach() - inputs.old_logprobs).exp()
    weight = ratio.clamp(1.0 - config.clip_eps_low, 1.0 + config.clip_eps_high)
    return -weight * inputs.advantages * inputs.logprobs, weight != ratio


def compute_policy_gradient_loss(
    inputs: PolicyLossInputs, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE: loss_t = -A_t logprobs_t, without a ratio; right for the first update on fresh rollouts."""
    return -inputs.advantages * inputs.logprobs, torch.zeros_like(inputs.loss_mask)


def _clip_surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's pessimistic bound with optional dual clip; clipped is where the bound cuts the gradient off."""
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - config.clip_eps_low, 1.0 + config.clip_eps_high) * advantages
    is_clipped, token_loss = clipped > unclipped, torch.maximum(unclipped, clipped)
    if config.dual_clip is not None:
        is_negative, highest = advantages < 0, -config.dual_clip * advantages
        is_clipped = is_clipped | (is_negative & (highest < token_loss))
        token_loss = torch.where(is_negative, torch.minimum(token_loss, highest), token_loss)
    return token_loss, is_clipped
