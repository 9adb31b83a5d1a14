# SPDX-License-Identifier: Apache-2.0
"""Advantages from log-probs and rewards: KL, the log-prob mismatch between trainer and engine, estimators.

In this module `group` is the DP group of the batch's role.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms import advantages as estimation
from megatron_rl.algorithms import losses, mismatch
from megatron_rl.algorithms.catalog import CHOOSES_TOKENS
from megatron_rl.algorithms.kl import compute_kl
from megatron_rl.algorithms.losses import PolicyLossInputs
from megatron_rl.algorithms.plugin_types import Responses, mark_first
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.parallel.collectives import raise_together, reduce_scalars
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.samples.experience import Experience
from megatron_rl.samples.table import Headers
from megatron_rl.types import UserError


def measure_kl(headers: Headers, batch: TrainBatch, kl_type: str, group: dist.ProcessGroup) -> np.ndarray:
    """Compute the KL of each rollout, summed over its loss tokens, [num_rollouts]; collective, equal on every rank."""
    kl = _compute_kl(batch, kl_type).double()
    per_rollout = torch.zeros(len(headers.rollouts) + 1, dtype=torch.float64, device=kl.device)
    per_rollout.index_add_(0, find_rollouts(headers, batch), kl)  # padding (-1) is added to the last entry
    dist.all_reduce(per_rollout, group=group)
    return per_rollout[:-1].cpu().numpy()


def _compute_kl(batch: TrainBatch, kl_type: str) -> torch.Tensor:
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
        has_reward=headers.rollouts.has_reward,
    )
    found = estimation.compute_advantages(inputs, algorithm)
    if batch.teacher_logprobs is None:
        return found
    lesson = algorithm.distillation.coef * (batch.teacher_logprobs - batch.column("old_logprobs"))
    return replace(found, advantages=found.advantages + torch.where(batch.loss_mask, lesson, 0.0))


def _find_responses(headers: Headers, batch: TrainBatch, group: dist.ProcessGroup) -> Responses:
    rollouts, device = find_rollouts(headers, batch), batch.sequence_ids.device
    begins_rollout = np.isin(np.arange(len(headers) + 1), headers.first_of_rollout)  # False for padding, the last one
    is_first = mark_first(batch.sequence_ids) & torch.from_numpy(begins_rollout).to(device)[batch.sequence_ids]

    def add_up(values: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(len(headers.rollouts) + 1, dtype=torch.float64, device=device)
        sums.index_add_(0, rollouts, values.double())
        dist.all_reduce(sums, group=group)
        return sums[rollouts]

    return Responses(is_first, add_up)


def correct_mismatch(
    headers: Headers, batch: TrainBatch, algorithm: AlgorithmConfig, group: dist.ProcessGroup
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Measure the mismatch between `old_logprobs` and the engine's log-probs; collective.

    Returns:
        Correcting importance weights [t] or `None`, and the metrics `mismatch/...`.
    """
    device, old_logprobs = batch.tokens.device, batch.column("old_logprobs")
    sums, maximum = mismatch.sum_mismatch(old_logprobs, batch.rollout_logprobs, batch.loss_mask)
    responses = _find_responses(headers, batch, group)
    weights, counts = mismatch.compute_importance_weights(
        old_logprobs, batch.rollout_logprobs, batch.loss_mask, responses, algorithm
    )
    counts = {name: float(value) for name, value in counts.items()}
    sums, counts = (reduce_scalars(part, dist.ReduceOp.SUM, group, device) for part in (sums, counts))
    if weights is not None and algorithm.importance_normalize:
        weights = mismatch.normalize_weights(weights, counts)
    maxima = reduce_scalars({"max": maximum}, dist.ReduceOp.MAX, group, device)
    return weights, mismatch.finish_mismatch(sums, maxima["max"]) | mismatch.finish_importance_weights(counts)


def measure_lags(batch: TrainBatch, lags: torch.Tensor, most: int, group: dist.ProcessGroup) -> dict[str, float]:
    """Return `mismatch/lag<N>`: mean |log-prob gap| of trainer and engine on tokens of lag N <= `most`; collective.

    Args:
        lags: [t] steps of the main loop between the sampling policy and the current one.
    """
    gaps = (batch.column("old_logprobs") - batch.rollout_logprobs).abs().double()
    sums: dict[str, float] = {}
    for lag in range(most + 1):
        chosen = batch.loss_mask & (lags == lag)
        sums |= {f"gap{lag}": float(gaps[chosen].sum()), f"count{lag}": float(chosen.sum())}
    sums = reduce_scalars(sums, dist.ReduceOp.SUM, group, batch.tokens.device)
    counted = [lag for lag in range(most + 1) if sums[f"count{lag}"]]
    return {f"mismatch/lag{lag}": sums[f"gap{lag}"] / sums[f"count{lag}"] for lag in counted}


def measure_stale_routes(headers: Headers, batch: TrainBatch, version: int, group: dist.ProcessGroup) -> float:
    """Compute the share of replayed loss tokens whose sequence's last version is older than `version`; collective."""
    routes, is_stale = batch.column("replayed_routes"), np.append(headers["last_version"] < version, False)
    replayed = batch.loss_mask & (routes[:, 0, 0] != torch.iinfo(routes.dtype).max)
    stale = replayed & torch.from_numpy(is_stale).to(routes.device)[batch.sequence_ids]
    counts = {"stale": float(stale.sum()), "replayed": float(replayed.sum())}
    counts = reduce_scalars(counts, dist.ReduceOp.SUM, group, routes.device)
    return counts["stale"] / max(counts["replayed"], 1.0)


def check_bits(batch: TrainBatch, is_current: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Check that `old_logprobs` equals the engine's log-probs bit for bit (rollout.bitwise); collective.

    Args:
        is_current: [t] bool, whether the current policy version sampled the token.

    Raises:
        UserError: on all ranks; names the first token that differs.
    """
    ours, engine = batch.column("old_logprobs"), batch.rollout_logprobs
    differs = (batch.loss_mask & is_current & (ours != engine)).nonzero()[:, 0].tolist()
    error = None
    if differs:
        row = differs[0]
        error = UserError(
            f"{len(differs)} tokens whose log-probs are others in the engine than in the trainer: the first is token "
            f"{int(batch.position_ids[row])} of {batch.name_sequence(int(batch.sequence_ids[row]))}, "
            f"{float(engine[row])!r} in the engine and {float(ours[row])!r} in the trainer",
            source="rollout.bitwise",
            expected="the same bits",
            hint="weights, masks, positions or one operation differ between the two (tools/check_parity.py finds the "
            "layer); rollout.bitwise=false trains with the gap, which mismatch/max shows",
        )
    raise_together(error, group)


def choose_tokens(batch: TrainBatch, algorithm: AlgorithmConfig, group: dist.ProcessGroup) -> torch.Tensor | None:
    """Return the tokens that the loss clip_cov or kl_cov treats specially, `None` for other losses; collective."""
    if algorithm.policy_loss not in CHOOSES_TOKENS:
        return None
    return losses.choose_tokens(loss_inputs(batch), algorithm, group)


def loss_inputs(batch: TrainBatch) -> PolicyLossInputs:
    """Build the inputs of the policy loss before the update."""
    old_logprobs = batch.column("old_logprobs")
    return PolicyLossInputs(
        old_logprobs, old_logprobs, batch.column("advantages"), batch.loss_mask, batch.sequence_ids, batch.chosen
    )
