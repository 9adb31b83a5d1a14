# SPDX-License-Identifier: Apache-2.0
"""Advantages from log-probs and rewards: KL, the log-prob mismatch between trainer and engine, estimators.

The mismatch, of equal tokens and weights, with d = old_logprobs - rollout_logprobs and w = exp(d) per token:

    max, mean                of |d|
    k3                       mean of w - 1 - d, an estimate of KL(rollout || trainer)
    effective_sample_size    (sum w)^2 / (N sum w^2): 1 if all weights are equal

In this module `group` is the DP group of the batch's role.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms import advantages as estimation
from megatron_rl.algorithms.catalog import CHOOSES_TOKENS, has_importance_weights
from megatron_rl.algorithms.plugin_types import PolicyLossInputs
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.parallel.collectives import reduce_scalars
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.samples.experience import Experience
from megatron_rl.samples.table import Headers


def measure_kl(headers: Headers, batch: TrainBatch, kl_type: str, group: dist.ProcessGroup) -> np.ndarray:
    """Compute the KL of each rollout, summed over its loss tokens, [num_rollouts]; collective, equal on every rank."""
    kl = _compute_kl(batch, kl_type).double()
    per_rollout = torch.zeros(len(headers.rollouts) + 1, dtype=torch.float64, device=kl.device)
    per_rollout.index_add_(0, find_rollouts(headers, batch), kl)  # padding (-1) is added to the last entry
    dist.all_reduce(per_rollout, group=group)
    return per_rollout[:-1].cpu().numpy()


def _compute_kl(batch: TrainBatch, kl_type: str) -> torch.Tensor:
    from megatron_rl.algorithms.kl import compute_kl

    kl = compute_kl(batch.column("old_logprobs"), batch.column("ref_logprobs"), kl_type)
    return torch.where(batch.loss_mask, kl, 0.0)


def find_rollouts(headers: Headers, batch: TrainBatch) -> torch.Tensor:
    """Return the rollout index of each token, [t] int64; padding has the number of rollouts as index."""
    table = torch.from_numpy(np.append(headers["rollout"], len(headers.rollouts)).astype(np.int64))
    return table.to(batch.sequence_ids.device)[batch.sequence_ids]


def compute_advantages(
    samples: Experience,
    batch: TrainBatch,
    algorithm: AlgorithmConfig,
    group: dist.ProcessGroup,
    turn_rewards: torch.Tensor | None = None,
) -> estimation.Advantages:
    """Compute the advantages (with a critic, also the returns) of this rank's tokens; collective.

    Args:
        batch: with old log-probs, and reference log-probs and values if there are any.
    """
    headers = samples.headers
    rewards = samples.rewards
    kl, scores = None, rewards
    if samples.kl_per_rollout is not None and algorithm.kl_in == "reward":
        kl = _compute_kl(batch, algorithm.kl_type)
        scores = rewards - algorithm.kl_coef * samples.kl_per_rollout
    inputs = estimation.AdvantageInputs(
        scores=scores,
        group_sizes=headers.group_sizes,
        baselines=samples.baselines,
        token_rewards=estimation.compute_token_rewards(
            headers["reward"] - headers["earlier_reward"],
            kl,
            algorithm.kl_coef,
            batch.loss_mask,
            batch.sequence_ids,
            turn_rewards,
        ),
        values=batch.values,
        loss_mask=batch.loss_mask,
        sequence_ids=batch.sequence_ids,
        rollout_ids=find_rollouts(headers, batch),
        group=group,
        old_logprobs=batch.old_logprobs,
        sum_pi_squared=batch.sum_pi_squared,
        importance_weights=batch.importance_weights,
        components=dict(zip(headers.names, headers.rollouts.components.T, strict=True)),
        has_reward=headers.rollouts.has_reward,
    )
    found = estimation.compute_advantages(inputs, algorithm)
    if batch.teacher_logprobs is None:
        return found
    lesson = algorithm.distillation.coef * (batch.teacher_logprobs - batch.column("old_logprobs"))
    return replace(found, advantages=found.advantages + torch.where(batch.loss_mask, lesson, 0.0))


def sum_mismatch(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[dict[str, float], float]:
    """Sum this rank's terms of the mismatch metrics over its tokens in the loss.

    Returns:
        Sums, to be added over DP ranks for `finish_mismatch`, and the maximum of |old_logprobs - rollout_logprobs|.
    """
    d = (old_logprobs - rollout_logprobs)[loss_mask].double()
    w = d.exp()
    sums = {"abs": d.abs().sum(), "k3": (torch.expm1(d) - d).sum(), "w": w.sum(), "w2": w.square().sum()}
    maximum = float(d.abs().max()) if len(d) else 0.0
    return {**{k: float(v) for k, v in sums.items()}, "tokens": float(d.numel())}, maximum


def finish_mismatch(sums: dict[str, float], maximum: float) -> dict[str, float]:
    """Compute the metrics `mismatch/*` from the sums and the maximum over all ranks."""
    tokens = max(sums["tokens"], 1.0)
    return {
        "mismatch/max": maximum,
        "mismatch/mean": sums["abs"] / tokens,
        "mismatch/k3": sums["k3"] / tokens,
        "mismatch/effective_sample_size": sums["w"] ** 2 / (tokens * sums["w2"]) if sums["w2"] else 1.0,
    }


def correct_mismatch(
    headers: Headers, batch: TrainBatch, algorithm: AlgorithmConfig, group: dist.ProcessGroup
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Measure the mismatch between `old_logprobs` and the engine's log-probs; collective.

    Returns:
        Correcting importance weights [t] or `None`, and the metrics `mismatch/...`.
    """
    device = batch.tokens.device
    sums, maximum = sum_mismatch(batch.column("old_logprobs"), batch.rollout_logprobs, batch.loss_mask)
    sums = reduce_scalars(sums, dist.ReduceOp.SUM, group, device)
    maxima = reduce_scalars({"max": maximum}, dist.ReduceOp.MAX, group, device)
    metrics = finish_mismatch(sums, maxima["max"])
    if not has_importance_weights(algorithm):
        return None, metrics
    from megatron_rl.samples.corrections import weigh_tokens

    weights, further = weigh_tokens(headers, batch, find_rollouts(headers, batch), algorithm, group)
    return weights, metrics | further


def choose_tokens(batch: TrainBatch, algorithm: AlgorithmConfig, group: dist.ProcessGroup) -> torch.Tensor | None:
    """Return the tokens that the loss clip_cov or kl_cov treats specially, `None` for other losses; collective."""
    if algorithm.policy_loss not in CHOOSES_TOKENS:
        return None
    from megatron_rl.algorithms import policy_losses

    return policy_losses.choose_tokens(loss_inputs(batch), algorithm, group)


def loss_inputs(batch: TrainBatch) -> PolicyLossInputs:
    """Build the inputs of the policy loss before the update."""
    old_logprobs = batch.column("old_logprobs")
    return PolicyLossInputs(
        old_logprobs, old_logprobs, batch.column("advantages"), batch.loss_mask, batch.sequence_ids, batch.chosen
    )
