# SPDX-License-Identifier: Apache-2.0
"""Losses that hold back the tokens which would lower the entropy most (arXiv 2505.22617): Clip-Cov and KL-Cov.

    cov_t = (A_t - mean A) (logprob_t - mean logprob)        means over all tokens in the loss of a step

The tokens are chosen once per step, before the first update, from `old_logprobs` and the advantages of all DP ranks:
the choice is the same for every split into microbatches, ranks and minibatches, and stays for all passes. (verl
chooses again in each microbatch, from the current log-probs and with the means of that microbatch.)
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.catalog import CHOOSES_TOKENS
from megatron_rl.algorithms.inputs import PolicyLossInputs
from megatron_rl.algorithms.policy_losses import bounded_ratio, clip_surrogate
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.parallel.collectives import gather_objects


def compute_clip_cov_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate, and no gradient for the chosen tokens (Clip-Cov)."""
    token_loss, is_clipped = clip_surrogate(inputs.logprobs - inputs.old_logprobs, inputs.advantages, config)
    if inputs.chosen is None:
        return token_loss, is_clipped
    return torch.where(inputs.chosen & ~is_clipped, 0.0, token_loss), is_clipped | inputs.chosen


def compute_kl_cov_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The surrogate without a clip, and a penalty on the chosen tokens (KL-Cov).

    loss_t = -ratio_t A_t (+ kl_cov_coef |logprobs_t - old_logprobs_t| where chosen)
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    token_loss = -bounded_ratio(log_ratio) * inputs.advantages
    if inputs.chosen is not None:
        token_loss = token_loss + torch.where(inputs.chosen, config.kl_cov_coef * log_ratio.abs(), 0.0)
    return token_loss, torch.zeros_like(inputs.loss_mask)


@torch.no_grad()
def choose_tokens(inputs: PolicyLossInputs, config: AlgorithmConfig, group: dist.ProcessGroup) -> torch.Tensor | None:
    """The tokens that `clip_cov` or `kl_cov` hold back: max(1, cov_ratio * tokens of the step) of them; collective.

        kl_cov      the greatest cov_t
        clip_cov    of those with clip_cov_low < cov_t < clip_cov_high, by a hash of sequence and position: a choice
                    that is random with regard to the tokens and repeatable

    Args:
        inputs: this rank's tokens; `logprobs` is not used.
        config: `policy_loss` and its settings.
        group: the DP group over whose ranks the tokens are spread.

    Returns:
        [t] bool, or None where the loss chooses none.
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
    starts = np.flatnonzero(np.diff(ids, prepend=-1))  # a sequence's tokens stand together
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
    """Which rows of this rank are among the first `wanted` rows of all ranks, in lexicographic order; collective."""
    order = np.lexsort(columns.T[::-1])[:wanted]
    shares = gather_objects(columns[order], group)
    owners = np.repeat(np.arange(len(shares)), [len(share) for share in shares])
    first = np.lexsort(np.concatenate(shares).T[::-1])[:wanted]
    return order[: int((owners[first] == group.rank()).sum())]  # a rank's rows keep their order


def _hash(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) that look random, by the finalizer of splitmix64."""
    x = (ids.astype(np.uint64) << np.uint64(32)) + positions.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))) / 2.0**64
