# SPDX-License-Identifier: Apache-2.0
"""The policy's total loss: policy-gradient term, KL, entropy and distillation, with metrics; built-in policy losses.

`loss_weights` hold global denominators (`aggregation.py`): sums over microbatches and DP ranks give the optimizer
step's loss. Shapes depend on t only, for CUDA graphs.

A policy loss returns the loss of each token, and whether its gradient is clipped. Its inputs are 0 at masked positions.
At logprobs == old_logprobs every built-in loss has the gradient of -A * logprob.

Clip-Cov and KL-Cov (arXiv 2505.22617) restrain the tokens that would lower the entropy most (`choose_tokens`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.catalog import (  # noqa: F401  plugins import the decorator from here
    CHOOSES_TOKENS,
    find_policy_loss,
    register_policy_loss,
)
from megatron_rl.algorithms.kl import MAX_LOG_RATIO, compute_kl
from megatron_rl.algorithms.plugin_types import PolicyLossInputs, number_segments, sum_per_segment
from megatron_rl.config.fields import find_options
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.parallel.collectives import gather_objects
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
    found = find_policy_loss(name)(replace(inputs, options=find_options(config, name)), config)
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


def compute_sft_loss(
    logprobs: torch.Tensor, loss_mask: torch.Tensor, loss_weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the negative log-likelihood of the response tokens: `sum_t w_t (-logprobs_t)`."""
    loss = -(loss_weights * torch.where(loss_mask, logprobs, 0.0)).sum()
    return loss, {
        "loss": loss.detach(),
        "tokens": loss_mask.sum().float(),
        "weights": torch.where(loss_mask, loss_weights, 0.0).sum(),
    }


_KL_EPSILON = 1e-8


def compute_ppo_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the clipped surrogate per token (PPO, arXiv 1707.06347, eq. 7).

        ratio_t = exp(logprobs_t - old_logprobs_t)
        loss_t = -min(ratio_t A_t, clip(ratio_t, 1 - eps_low, 1 + eps_high) A_t)

    Unequal bounds are clip-higher (DAPO, arXiv 2503.14476, eq. 10); `dual_clip` also bounds the loss of negative
    advantages (arXiv 1912.09729).
    """
    return clip_surrogate(inputs.logprobs - inputs.old_logprobs, inputs.advantages, config, config.dual_clip)


def compute_gspo_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the clipped surrogate with one ratio per sequence (GSPO, arXiv 2507.18071, eq. 7 and 14).

        s_i = exp(mean_t (logprobs_t - old_logprobs_t))             over the tokens in the loss
        s_it = sg[s_i] * exp(logprobs_t - sg[logprobs_t])           equal to s_i
        loss_t = -min(s_it A_t, clip(s_it, 1 - eps_low, 1 + eps_high) A_t)

    With seq-mean-token-mean, this has the value and gradient of -min(s_i A_i, clip(s_i) A_i). A forked episode has a
    ratio per branch, since its branches may be in different microbatches.
    """
    mean = _sequence_mean(inputs.logprobs - inputs.old_logprobs, inputs)
    log_ratio = mean + (inputs.logprobs - inputs.logprobs.detach())
    return clip_surrogate(log_ratio, inputs.advantages, config, config.dual_clip)


def compute_geo_mean_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the geometric mean of token-wise clipped ratios (GMPO, arXiv 2507.20673).

        c_t = log ratio_t, at most eps_high if A_t > 0 and at least -eps_low if A_t < 0
        s_i = exp(mean_t c_t)
        loss_t = -mean_t(A_t) sg[s_i] exp(c_t - sg[c_t])

    With seq-mean-token-mean, this has the value and gradient of -A_i s_i. Each branch of a forked episode is a
    sequence of its own.
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
    tau = torch.full_like(ratio, config.sapo_tau_neg).masked_fill(advantages > 0, config.sapo_tau_pos)
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
    segments = number_segments(inputs.sequence_ids)
    count = sum_per_segment(inputs.loss_mask, segments).clamp(min=1)
    return (sum_per_segment(values, segments) / count).to(values.dtype)


def compute_clip_cov_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute PPO's clipped surrogate without gradient for the tokens in `inputs.chosen` (Clip-Cov)."""
    token_loss, is_clipped = clip_surrogate(inputs.logprobs - inputs.old_logprobs, inputs.advantages, config)
    if inputs.chosen is None:
        return token_loss, is_clipped
    return torch.where(inputs.chosen & ~is_clipped, 0.0, token_loss), is_clipped | inputs.chosen


def compute_kl_cov_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the unclipped surrogate with a penalty on the tokens in `inputs.chosen` (KL-Cov).

    loss_t = -ratio_t A_t (+ kl_cov_coef |logprobs_t - old_logprobs_t| if chosen)
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    token_loss = -bounded_ratio(log_ratio) * inputs.advantages
    if inputs.chosen is not None:
        token_loss = token_loss + torch.where(inputs.chosen, config.kl_cov_coef * log_ratio.abs(), 0.0)
    return token_loss, torch.zeros_like(inputs.loss_mask)


@torch.no_grad()
def choose_tokens(inputs: PolicyLossInputs, config: AlgorithmConfig, group: dist.ProcessGroup) -> torch.Tensor | None:
    """Choose max(1, cov_ratio * tokens of the step) tokens for `clip_cov` or `kl_cov` to restrain; collective.

        cov_t       (A_t - mean A) (old_logprob_t - mean old_logprob)
        kl_cov      the tokens with the greatest cov_t
        clip_cov    pseudorandom ones of the tokens with clip_cov_low < cov_t < clip_cov_high, the same in every layout

    Args:
        group: DP group over which the step's tokens are spread; means are over all of them.

    Returns:
        [t] bool, or `None` for losses that choose no tokens.
    """
    if config.policy_loss not in CHOOSES_TOKENS:
        return None
    mask = inputs.loss_mask
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
        candidates = np.flatnonzero((scores > config.clip_cov_low) & (scores < config.clip_cov_high))
        scores = _hash(ids, positions)
    columns = np.stack([-scores, ids, positions], axis=1)[candidates]
    mine = _find_first(columns, max(int(config.cov_ratio * count), 1), group)
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
