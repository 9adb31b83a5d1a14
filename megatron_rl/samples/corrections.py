# SPDX-License-Identifier: Apache-2.0
"""Importance weights of a step's samples, and measures of the gap to the engine that a setting turns on.

In this module `group` is the DP group of the batch's role.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.importance import (
    Responses,
    compute_importance_weights,
    finish_importance_weights,
    normalize_weights,
)
from megatron_rl.algorithms.losses import mark_first
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.parallel.collectives import raise_together, reduce_scalars
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.samples.table import Headers
from megatron_rl.types import UserError


def weigh_tokens(
    headers: Headers, batch: TrainBatch, rollouts: torch.Tensor, algorithm: AlgorithmConfig, group: dist.ProcessGroup
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return importance weights [t] and their metrics `mismatch/...`; collective.

    Args:
        rollouts: [t], the rollout index of each token.
    """
    responses = Responses.of_sequences(batch.sequence_ids)
    if algorithm.importance_by == "rollout":
        responses = _find_rollouts(headers, batch, rollouts, group)
    weights, sums = compute_importance_weights(
        batch.column("old_logprobs"), batch.rollout_logprobs, batch.loss_mask, responses, algorithm
    )
    counts = {name: float(value) for name, value in sums.items()}
    counts = reduce_scalars(counts, dist.ReduceOp.SUM, group, batch.tokens.device)
    if algorithm.importance_normalize:
        weights = normalize_weights(weights, counts)
    return weights, finish_importance_weights(counts)


def _find_rollouts(headers: Headers, batch: TrainBatch, rollouts: torch.Tensor, group: dist.ProcessGroup) -> Responses:
    device = batch.sequence_ids.device
    begins_rollout = np.isin(np.arange(len(headers) + 1), headers.first_of_rollout)  # False for padding, the last one
    is_first = mark_first(batch.sequence_ids) & torch.from_numpy(begins_rollout).to(device)[batch.sequence_ids]

    def add_up(values: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(len(headers.rollouts) + 1, dtype=torch.float64, device=device)
        sums.index_add_(0, rollouts, values.double())
        dist.all_reduce(sums, group=group)
        return sums[rollouts]

    return Responses(is_first, add_up)


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
