# SPDX-License-Identifier: Apache-2.0
"""The built-in policy losses besides PPO (`losses.py`), loaded when `algorithm.policy_loss` names one.

A policy loss returns the loss of each token, and whether its gradient is clipped. Its inputs are 0 at masked positions.
At logprobs == old_logprobs every built-in loss has the gradient of -A * logprob. Shapes depend on t only, for CUDA
graphs.

Clip-Cov and KL-Cov (arXiv 2505.22617) restrain the tokens that would lower the entropy most (`choose_tokens`).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.losses import (
    MAX_LOG_RATIO,
    PolicyLossInputs,
    bounded_ratio,
    clip_surrogate,
    find_options,
    number_segments,
    sum_per_segment,
)
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.parallel.collectives import gather_objects

_KL_EPSILON = 1e-8


def compute_gspo_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the clipped surrogate with one ratio per sequence (GSPO, arXiv 2507.18071, eq. 7 and 14).

        s_i = exp(mean_t (logprobs_t - old_logprobs_t))             over the tokens in the loss
        s_it = sg[s_i] * exp(logprobs_t - sg[logprobs_t])           equal to s_i
        loss_t = -min(s_it A_t, clip(s_it, 1 - eps_low, 1 + eps_high) A_t)

    With seq-mean-token-mean, this has the value and gradient of -min(s_i A_i, clip(s_i) A_i). Of a forked episode, the
    sequence is each branch or the whole rollout (`ratio_by`).
    """
    mean = _sequence_mean(inputs.logprobs - inputs.old_logprobs, inputs)
    log_ratio = mean + (inputs.logprobs - inputs.logprobs.detach())
    return clip_surrogate(log_ratio, inputs.advantages, config, config.dual_clip)


def compute_geo_mean_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the geometric mean of token-wise clipped ratios (GMPO, arXiv 2507.20673).

        c_t = log ratio_t, at most eps_high if A_t > 0 and at least -eps_low if A_t < 0
        s_i = exp(mean_t c_t)
        loss_t = -mean_t(A_t) sg[s_i] exp(c_t - sg[c_t])

    With seq-mean-token-mean, this has the value and gradient of -A_i s_i. Sequences: see `compute_gspo_loss`.
    """
    log_ratio, advantages = inputs.logprobs - inputs.old_logprobs, inputs.advantages
    bounded = log_ratio.clamp(-config.clip_eps_low, config.clip_eps_high)
    sign = advantages.sign()
    is_clipped = sign * bounded < sign * log_ratio
    kept = torch.where(is_clipped, bounded, log_ratio)
    ratio = (_sequence_mean(kept, inputs) + (kept - kept.detach())).clamp(max=MAX_LOG_RATIO).exp()
    return -ratio * _sequence_mean(advantages, inputs), is_clipped


def compute_sapo_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the surrogate with a smooth gate instead of a clip (SAPO, arXiv 2511.20347).

    loss_t = -A_t 4 / tau sigmoid(tau (ratio_t - 1))      tau = tau_pos if A_t > 0, else tau_neg
    """
    ratio, advantages = bounded_ratio(inputs.logprobs - inputs.old_logprobs), inputs.advantages
    tau = torch.full_like(ratio, inputs.options.tau_neg).masked_fill(advantages > 0, inputs.options.tau_pos)
    return -advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau, torch.zeros_like(inputs.loss_mask)


def compute_dppo_tv_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the policy gradient in a total-variation trust region (DPPO, arXiv 2602.04879).

        D_t = |p_t - p_old,t|                                       p the probability of the token
        loss_t = -sg[min(ratio_t, c)] A_t logprobs_t, or 0 if D_t > delta and the push is outwards

    Outwards means p_t > p_old,t with A_t > 0 (delta = eps_high), or the opposite (delta = eps_low); c is `dual_clip`.
    p_old is the policy before the update (the paper's is the sampling policy).
    """
    return _cut_outwards(inputs, config, inputs.logprobs.detach().exp() - inputs.old_logprobs.exp())


def compute_dppo_kl_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss of `compute_dppo_tv_loss` with the binary KL divergence as distance (DPPO, arXiv 2602.04879).

    D_t = p_old,t log(p_old,t / p_t) + (1 - p_old,t) log((1 - p_old,t) / (1 - p_t))     p the probability of the token
    """
    logprobs, old_logprobs = inputs.logprobs.detach(), inputs.old_logprobs
    p, old = logprobs.exp(), old_logprobs.exp()
    divergence = (
        old * (old_logprobs - logprobs)
        + (1.0 - old) * (((1.0 - old).clamp(min=0) + _KL_EPSILON) / ((1.0 - p).clamp(min=0) + _KL_EPSILON)).log()
    )
    return _cut_outwards(inputs, config, divergence * (p - old).sign())


def compute_cispo_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the clipped importance weight times log-prob (CISPO, arXiv 2506.13585, eq. 4 and 5).

        loss_t = -sg[clip(ratio_t, 1 - eps_low, 1 + eps_high)] A_t logprobs_t

    Every token keeps a gradient. The paper has no lower bound (eps_low = 1 here).
    """
    ratio = bounded_ratio(inputs.logprobs.detach() - inputs.old_logprobs)
    weight = ratio.clamp(1.0 - config.clip_eps_low, 1.0 + config.clip_eps_high)
    return -weight * inputs.advantages * inputs.logprobs, weight != ratio


def compute_policy_gradient_loss(
    inputs: PolicyLossInputs, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute REINFORCE, loss_t = -A_t logprobs_t, without a ratio: exact for the first update on fresh rollouts."""
    return -inputs.advantages * inputs.logprobs, torch.zeros_like(inputs.loss_mask)


def compute_dro_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute REINFORCE with a quadratic penalty (direct reward optimization, arXiv 2405.19107).

    loss_t = -A_t logprobs_t + beta / 2 (logprobs_t - old_logprobs_t)^2
    """
    loss, is_clipped = compute_policy_gradient_loss(inputs, config)
    return loss + 0.5 * inputs.options.beta * (inputs.logprobs - inputs.old_logprobs).square(), is_clipped


def compute_clip_cov_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute PPO's clipped surrogate without gradient for the tokens in `inputs.chosen` (Clip-Cov)."""
    token_loss, is_clipped = clip_surrogate(inputs.logprobs - inputs.old_logprobs, inputs.advantages, config)
    if inputs.chosen is None:
        return token_loss, is_clipped
    return torch.where(inputs.chosen & ~is_clipped, 0.0, token_loss), is_clipped | inputs.chosen


def compute_kl_cov_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the unclipped surrogate with a penalty on the tokens in `inputs.chosen` (KL-Cov).

    loss_t = -ratio_t A_t (+ coef |logprobs_t - old_logprobs_t| if chosen)
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    token_loss = -bounded_ratio(log_ratio) * inputs.advantages
    if inputs.chosen is not None:
        token_loss = token_loss + torch.where(inputs.chosen, inputs.options.coef * log_ratio.abs(), 0.0)
    return token_loss, torch.zeros_like(inputs.loss_mask)


def _cut_outwards(
    inputs: PolicyLossInputs, config: AlgorithmConfig, moved: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the policy gradient with a truncated ratio, zero for tokens that would leave the trust region further.

    Args:
        moved: [t] signed distance from the old policy, bounded by -clip_eps_low and clip_eps_high.

    Returns:
        Token losses and the tokens without gradient, [t] each.
    """
    ratio = bounded_ratio(inputs.logprobs.detach() - inputs.old_logprobs)
    if config.dual_clip is not None:
        ratio = ratio.clamp(max=config.dual_clip)
    is_cut = torch.where(inputs.advantages > 0, moved > config.clip_eps_high, moved < -config.clip_eps_low)
    return torch.where(is_cut, 0.0, -ratio * inputs.advantages * inputs.logprobs), is_cut


@torch.no_grad()
def _sequence_mean(values: torch.Tensor, inputs: PolicyLossInputs) -> torch.Tensor:
    """Return each token's mean over its sequence's tokens in the loss, [t]; `values` must be 0 at masked positions."""
    rows = inputs.rollout_rows
    segments = (
        number_segments(inputs.sequence_ids) if rows is None else torch.arange(len(rows), device=rows.device) - rows
    )
    count = sum_per_segment(inputs.loss_mask, segments).clamp(min=1)
    return (sum_per_segment(values, segments) / count).to(values.dtype)


@torch.no_grad()
def choose_tokens(inputs: PolicyLossInputs, config: AlgorithmConfig, group: dist.ProcessGroup) -> torch.Tensor:
    """Choose max(1, ratio * tokens of the step) tokens for `clip_cov` or `kl_cov` to restrain; collective.

        cov_t       (A_t - mean A) (old_logprob_t - mean old_logprob)
        kl_cov      the tokens with the greatest cov_t
        clip_cov    pseudorandom ones of the tokens with low < cov_t < high, the same in every layout

    Args:
        group: DP group over which the step's tokens are spread; means are over all of them.

    Returns:
        [t] bool.
    """
    mask, options = inputs.loss_mask, find_options(config, config.policy_loss)
    advantages, logprobs = (x[mask].double() for x in (inputs.advantages, inputs.old_logprobs))
    sums = torch.stack([mask.sum().double(), advantages.sum(), logprobs.sum()])
    dist.all_reduce(sums, group=group)
    count, means = int(sums[0]), sums[1:] / sums[0].clamp(min=1)
    scores = ((advantages - means[0]) * (logprobs - means[1])).cpu().numpy()
    ids = inputs.sequence_ids[mask].cpu().numpy()
    starts = np.flatnonzero(np.diff(ids, prepend=-1))  # sequences are contiguous
    positions = np.arange(len(ids)) - np.repeat(starts, np.diff(starts, append=len(ids)))
    candidates = np.arange(len(ids))
    if config.policy_loss == "clip_cov":
        candidates = np.flatnonzero((scores > options.low) & (scores < options.high))
        scores = _hash(ids, positions)
    columns = np.stack([-scores, ids, positions], axis=1)[candidates]
    mine = _find_first(columns, max(int(options.ratio * count), 1), group)
    chosen = torch.zeros_like(mask)
    chosen[mask.nonzero()[candidates[mine], 0]] = True
    return chosen


def _find_first(columns: np.ndarray, wanted: int, group: dist.ProcessGroup) -> np.ndarray:
    """Return the indices of this rank's rows among the `wanted` lexicographically smallest of all ranks; collective."""
    order = np.lexsort(columns.T[::-1])[:wanted]
    shares = gather_objects(columns[order], group)
    owners = np.repeat(np.arange(len(shares)), [len(share) for share in shares])
    first = np.lexsort(np.concatenate(shares).T[::-1])[:wanted]
    return order[: int((owners[first] == group.rank()).sum())]  # a rank's rows keep their order


def _hash(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a pseudorandom number in [0, 1) for each (id, position), by the finalizer of splitmix64."""
    x = (ids.astype(np.uint64) << np.uint64(32)) + positions.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))) / 2.0**64
