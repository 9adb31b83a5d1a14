# SPDX-License-Identifier: Apache-2.0
"""The critic: a model that tells the value of every state, trained towards the returns."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_rl.algorithms.value_loss import compute_value_loss, finish_explained_variance
from megatron_rl.config.schema import CriticConfig, ModelConfig
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.training.step import StepLoss
from megatron_rl.training.trainable import TrainedModel, describe_ledgers
from megatron_rl.weights.families import SCORE_HEAD, ModelShape


class Critic(TrainedModel):
    """A model with a score head, DDP, optimizer and learning-rate schedule, in a layout of its own.

    Args:
        model: dtype and implementation of the layers.
        config: layout, optimizer and clipping.
        shape: with a score head (`load_model_shape(path, head="score")`).
        groups: process groups of the critic's layout.
        path: HF directory of the initial weights: a language model (the head starts at zero, and so do all values),
            or a `*ForSequenceClassification` or `*ForTokenClassification` with one label.
        seed: of megatron-core's RNG streams.
        total_optimizer_steps: length of the learning-rate schedule.
    """

    role = "critic"
    _may_lack = (SCORE_HEAD,)

    def __init__(
        self, model: ModelConfig, config: CriticConfig, shape: ModelShape, groups: ParallelGroups,
        *, path: str | Path, seed: int, total_optimizer_steps: int,
    ) -> None:
        assert shape.has_score_head, 'load the shape with head="score"'
        super().__init__(model, config, shape, groups, path=path, seed=seed)
        self._value_clip = config.value_clip
        self.add_optimizer(config, total_optimizer_steps)
        self._value_loss = StepLoss("value", self._compute_value_loss)

    def compute_values(self, batch: TrainBatch) -> torch.Tensor:
        """Values of a packed batch, [t] float32, the same on every rank of the replica.

        `values[i]` is the value of the state in which `tokens[i]` was chosen, of everything before it; 0
        outside of the loss.
        """
        return self.compute_forward(batch)

    def update(self, minibatch: TrainBatch) -> dict[str, float]:
        """One optimizer step towards `minibatch.returns`, clipped about `minibatch.values`.

        Returns:
            Metrics, the same on every rank; the explained variance is that of the values before the update.
        """
        totals, grad_norm, lr = self.take_optimizer_step(minibatch, self._value_loss)
        return {
            "value/loss": totals["loss"],
            "value/explained_variance": finish_explained_variance(totals),
            "value/grad_norm": grad_norm,
            "value/lr": lr,
            "value/clip_fraction": totals["clipped"] / max(totals["tokens"], 1.0),
            **describe_ledgers(minibatch, totals),
        }

    def _compute_value_loss(
        self, microbatch: TrainBatch, values: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return compute_value_loss(
            values, microbatch.values, microbatch.returns, microbatch.loss_mask, microbatch.loss_weights,
            self._value_clip)

    def _read_out(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor]:
        """Values [t] of the tokens in the loss: the scores of the positions that predict them; 0 elsewhere."""
        places, rows, _ = self._predicted_rows(microbatch)
        return (self._combine(self.stages[-1].score(hidden)[rows], places, microbatch),)
