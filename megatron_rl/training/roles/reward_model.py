# SPDX-License-Identifier: Apache-2.0
"""The reward model: a frozen `*ForSequenceClassification` with one label that scores whole responses."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.setup import RoleSetup
from megatron_rl.training.token_heads import PositionScoreHead


class RewardModel:
    """Frozen model with a score head; construction is collective."""

    def __init__(self, setup: RoleSetup) -> None:
        self.model = PackedModel(setup)
        self.head = PositionScoreHead(self.model)

    def compute_scores(self, batch: TrainBatch) -> torch.Tensor:
        """Compute the score at the last token of every sequence, [num_rollouts] float32 on every rank; collective.

        transformers instead scores the last token that is not `pad_token_id`: the same, unless a sequence ends in that
        token.

        Args:
            batch: this DP rank's share; over all DP ranks, each of the rollouts 0, 1, ... appears once.
        """
        scores, group = self.model.compute_forward(batch, self.head), self.model.groups.dp
        ends = torch.cat([piece.start + piece.cu_seqlens[1:].long() - 1 for piece in batch.slices])
        ids = batch.sequence_ids[ends]
        ends, ids = ends[ids >= 0], ids[ids >= 0]
        count = batch.sequence_ids.max() + 1
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
        table = torch.zeros(int(count), dtype=torch.float32, device=scores.device)
        table[ids] = scores[ends]
        dist.all_reduce(table, group=group)
        return table
