# SPDX-License-Identifier: Apache-2.0
"""From log-probs and rewards to advantages: KL, the gap to the engine, estimators."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms import advantages as estimation
from megatron_rl.algorithms import covariance
from megatron_rl.algorithms.kl import compute_kl_penalty
from megatron_rl.algorithms.losses import PolicyLossInputs
from megatron_rl.algorithms.mismatch import (
    compute_importance_weights,
    finish_importance_weights,
    finish_mismatch,
    normalize_weights,
    sum_mismatch,
)
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.experience.collected import Collected
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.parallel.collectives import reduce_scalars


def measure_kl(
    batch: TrainBatch, num_rollouts: int, kl_type: str, group: dist.ProcessGroup
) -> tuple[np.ndarray, np.ndarray]:
    """KL of each rollout, summed over its tokens in the loss, and their number; the same on every rank; collective."""
    kl = compute_kl_penalty(batch.old_logprobs, batch.ref_logprobs, batch.loss_mask, kl_type).double()
    per_rollout = torch.zeros(num_rollouts + 1, 2, dtype=torch.float64, device=kl.device)
    places = batch.sequence_ids % (num_rollouts + 1)  # padding (-1) falls into the last entry
    per_rollout.index_add_(0, places, torch.stack([kl, batch.loss_mask.double()], dim=1))
    dist.all_reduce(per_rollout, group=group)
    kl_sums, tokens = per_rollout[:-1].T.cpu().numpy()
    return kl_sums, tokens


def compute_advantages(
    collected: Collected, batch: TrainBatch, algorithm: AlgorithmConfig, kl_per_rollout: np.ndarray | None,
    group: dist.ProcessGroup,
) -> estimation.Advantages:
    """Advantages (and returns, with a critic) of this rank's tokens; collective over `group`.

    Args:
        collected: rewards of all rollouts.
        batch: old log-probs, reference log-probs and values where there are any.
        algorithm: the estimator, with the current KL coefficient.
        kl_per_rollout: from `measure_kl`, where the KL term is in the reward.
        group: the actor's DP group.
    """
    rewards = np.array([rollout.reward for rollout in collected.rollouts], np.float64)
    kl, scores = None, rewards
    if kl_per_rollout is not None and algorithm.kl_in == "reward":
        kl = compute_kl_penalty(batch.old_logprobs, batch.ref_logprobs, batch.loss_mask, algorithm.kl_type)
        scores = rewards - algorithm.kl_coef * kl_per_rollout
    inputs = estimation.AdvantageInputs(
        scores=scores, group_sizes=np.array([g.group_size for g in collected.groups]),
        baselines=collected.baselines,
        token_rewards=estimation.compute_token_rewards(
            rewards, kl, algorithm.kl_coef, batch.loss_mask, batch.sequence_ids),
        values=batch.values, loss_mask=batch.loss_mask, sequence_ids=batch.sequence_ids, group=group,
        old_logprobs=batch.old_logprobs, sum_pi_squared=batch.sum_pi_squared,
        importance_weights=batch.importance_weights)
    return estimation.compute_advantages(inputs, algorithm)


def correct_mismatch(
    batch: TrainBatch, algorithm: AlgorithmConfig, group: dist.ProcessGroup
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Gap between `old_logprobs` and the engine's log-probs, and the weights that correct for it; collective.

    Returns:
        Importance weights [t] or None, and the metrics `mismatch/...`.
    """
    device = batch.tokens.device
    sums, maximum = sum_mismatch(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask)
    weights, counts = compute_importance_weights(
        batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask, batch.sequence_ids, algorithm)
    sums, counts = (reduce_scalars(part, dist.ReduceOp.SUM, group, device) for part in (sums, counts))
    if weights is not None and algorithm.importance_normalize:
        weights = normalize_weights(weights, counts)
    maxima = reduce_scalars({"max": maximum}, dist.ReduceOp.MAX, group, device)
    return weights, finish_mismatch(sums, maxima["max"]) | finish_importance_weights(counts)


def choose_tokens(batch: TrainBatch, algorithm: AlgorithmConfig, group: dist.ProcessGroup) -> torch.Tensor | None:
    """The tokens that the policy loss treats in another way, where it does that; collective."""
    return covariance.choose_tokens(loss_inputs(batch), algorithm, group)


def loss_inputs(batch: TrainBatch) -> PolicyLossInputs:
    """The tokens of a batch, with the log-probs from before the update."""
    return PolicyLossInputs(
        batch.old_logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask, batch.sequence_ids, batch.chosen)
