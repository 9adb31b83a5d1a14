# SPDX-License-Identifier: Apache-2.0
"""Values of tokens, moved between the packings of roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.losses import find_clipped
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.experience.estimate import loss_inputs
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.parallel.collectives import gather_arrays


def move_tokens(
    values: torch.Tensor, source: TrainBatch, destination: TrainBatch, is_owner: bool, group: dist.ProcessGroup
) -> torch.Tensor:
    """Bring values of the tokens in the loss from one role's packing into another's; collective over `group`.

    Args:
        values: [t] float32 in the packing of `source`.
        source, destination: batches of the same rollouts, each in a layout of its own.
        is_owner: exactly one rank of each DP replica of the source's role says True.
        group: all ranks of the job.

    Returns:
        [t] float32 in the packing of `destination`; 0 outside of the loss.
    """
    if source is destination:
        return values
    mask = source.loss_mask
    ids = gather_arrays([source.sequence_ids[mask].cpu().numpy()] if is_owner else [], np.int64, group)
    numbers = gather_arrays([values[mask].cpu().numpy()] if is_owner else [], np.float32, group)
    all_ids, all_numbers = (np.concatenate([x for rank in side for x in rank]) for side in (ids, numbers))
    places = destination.loss_mask.nonzero()[:, 0].cpu().numpy()
    wanted = destination.sequence_ids.cpu().numpy()[places]
    # Tokens of a rollout keep their order, so sorting both sides by rollout pairs them up.
    here, there = np.argsort(wanted, kind="stable"), np.argsort(all_ids, kind="stable")
    there = there[np.isin(all_ids[there], wanted)]
    assert np.array_equal(wanted[here], all_ids[there]), "both batches must hold the same tokens of the same rollouts"
    result = np.zeros(len(destination.tokens), np.float32)
    result[places[here]] = all_numbers[there]
    return torch.from_numpy(result).to(destination.tokens.device)


def gather_token_values(
    batch: TrainBatch, num_rollouts: int, algorithm: AlgorithmConfig, is_owner: bool, group: dist.ProcessGroup
) -> list[dict[str, np.ndarray]]:
    """What the step knew of each token of its first rollouts, for the rollout log; collective over `group`.

    Args:
        batch: of this rank, after its updates.
        num_rollouts: how many rollouts.
        algorithm: says which tokens are clipped.
        is_owner: one rank of each DP replica says True: of the last pipeline stage, where the updates are recorded.
        group: all ranks of the job.

    Returns:
        One dict per rollout, the same on every rank: name -> [number of its tokens in the loss] float32, with names
        `old_logprobs`, `advantages`; with a critic `values`; where updates are recorded `ratio`, `clipped` and
        `entropy` of the last one, NaN before the first.
    """
    return gather_columns(_token_columns(batch, algorithm), batch, num_rollouts, is_owner, group)


def gather_columns(
    columns: Mapping[str, torch.Tensor], batch: TrainBatch, num_rollouts: int, is_owner: bool,
    group: dist.ProcessGroup,
) -> list[dict[str, np.ndarray]]:
    """Values of the tokens in the loss by rollout and token, whatever the packing; collective over `group`.

    Args:
        columns: name -> [t] in the packing of `batch`; the same names on every rank.
        batch: of this rank.
        num_rollouts: how many rollouts are wanted, the first ones.
        is_owner: one rank of each DP replica says True.
        group: all ranks of the job.

    Returns:
        One dict per rollout, the same on every rank: name -> [number of its tokens in the loss] float32.
    """
    wanted = batch.loss_mask & (batch.sequence_ids < num_rollouts)
    ids = gather_arrays([batch.sequence_ids[wanted].cpu().numpy()] if is_owner else [], np.int64, group)
    numbers = gather_arrays(
        [column[wanted].cpu().numpy() for column in columns.values()] if is_owner else [], np.float32, group)
    all_ids = np.concatenate([x for rank in ids for x in rank])
    table = np.concatenate([np.stack(rank) for rank in numbers if rank], axis=1)  # [num_columns, tokens]
    order = np.argsort(all_ids, kind="stable")  # tokens of a rollout keep their order
    bounds = np.searchsorted(all_ids[order], np.arange(num_rollouts + 1))
    return [dict(zip(columns, table[:, order[start:stop]], strict=True)) for start, stop in pairwise(bounds)]


def _token_columns(batch: TrainBatch, algorithm: AlgorithmConfig) -> dict[str, torch.Tensor]:
    columns = {"old_logprobs": batch.old_logprobs, "advantages": batch.advantages, "values": batch.values}
    now = batch.update_logprobs
    if now is not None:
        clipped = find_clipped(
            replace(loss_inputs(batch), logprobs=now), algorithm)
        columns |= {"ratio": (now - batch.old_logprobs).exp(), "entropy": batch.update_entropy,
                    "clipped": torch.where(now.isnan(), now, clipped.float())}
    return {name: column for name, column in columns.items() if column is not None}
