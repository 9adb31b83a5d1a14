# SPDX-License-Identifier: Apache-2.0
"""The reward model: a frozen `*ForSequenceClassification` with one label that scores whole responses."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config.schema import ModelConfig, RewardModelConfig
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.weights.families import ModelShape


class RewardModel(PackedModel):
    """A model with a score head, without gradients or optimizer, in a layout of its own.

    Args:
        model: dtype and implementation of the layers.
        config: layout; `offload` keeps the weights on the host except while it scores.
        shape: with a score head (`load_model_shape(path, head="score")`).
        groups: process groups of its layout.
        path: HF directory with `score.weight`.
        seed: of megatron-core's RNG streams.
    """

    def __init__(
        self, model: ModelConfig, config: RewardModelConfig, shape: ModelShape, groups: ParallelGroups,
        *, path: str | Path, seed: int,
    ) -> None:
        assert shape.has_score_head, 'load the shape with head="score"'
        super().__init__(model, config, shape, groups, path=path, seed=seed)
        self.stages.requires_grad_(False)
        if config.offload:
            self.offload()

    def compute_scores(self, batch: TrainBatch) -> torch.Tensor:
        """The score at the last token of every sequence; collective over the role.

        transformers takes the last token that is not `pad_token_id`, which is the same for sequences that do not
        end in that token.

        Args:
            batch: of this DP rank; all of them together hold the rollouts 0, 1, ... once each.

        Returns:
            [num_rollouts] float32 by rollout, of all DP ranks, the same on every rank.
        """
        with self.on_device():
            scores = self.compute_forward(batch)
        ends = torch.cat([piece.start + piece.cu_seqlens[1:].long() - 1 for piece in batch.slices])
        ids = batch.sequence_ids[ends]
        ends, ids = ends[ids >= 0], ids[ids >= 0]
        count = batch.sequence_ids.max() + 1
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.groups.dp)
        table = torch.zeros(int(count), dtype=torch.float32, device=scores.device)
        table[ids] = scores[ends]
        dist.all_reduce(table, group=self.groups.dp)
        return table

    def _read_out(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor]:
        """Scores [t] of all positions."""
        mine = self._own_rows(microbatch)
        places = torch.arange(mine.start, mine.stop, device=hidden.device)
        return (self._combine(self.stages[-1].score(hidden), places, microbatch),)
