# SPDX-License-Identifier: Apache-2.0
"""The critic: a value model trained towards the returns."""

from __future__ import annotations

import torch

from megatron_rl.algorithms.value_loss import compute_value_loss, finish_explained_variance
from megatron_rl.config.schema import CriticConfig
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.optimizer import Optimizer
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.setup import RoleSetup
from megatron_rl.training.step import StepLoss
from megatron_rl.training.token_heads import ValueHead
from megatron_rl.training.update import OptimizerStep, build_step, describe_ledgers


class Critic:
    """Model with a score head and an optimizer; construction is collective.

    Args:
        setup: `spec.path` contains a language model (the head, and thus all values, start at zero), or a
            `*ForSequenceClassification` or `*ForTokenClassification` with one label.
    """

    def __init__(self, setup: RoleSetup) -> None:
        config = setup.spec.settings
        assert isinstance(config, CriticConfig)
        self.model = PackedModel(setup)
        self.head = ValueHead(self.model)
        self.optimizer = Optimizer(self.model, config, setup.total_optimizer_steps)
        self.step = build_step(self.model, self.head, self.optimizer, config)
        self._update = OptimizerStep(self.step, "critic")
        self._value_clip = config.value_clip
        self._value_loss = StepLoss("value", self._compute_value_loss, self.model.device)

    def compute_values(self, batch: TrainBatch) -> torch.Tensor:
        """Compute values [t] float32, 0 outside of the loss, on every rank of the replica.

        `values[i]` is the value of the state before `tokens[i]`.
        """
        return self.model.compute_forward(batch, self.head)

    def forward_backward(self, minibatch: TrainBatch) -> None:
        """Compute the gradients of the squared error to `minibatch.returns`, clipped around `minibatch.values`."""
        self._update.forward_backward(minibatch, self._value_loss)

    def optim_step(self) -> dict[str, float]:
        """Update the weights and return metrics; the explained variance refers to the values before the update."""
        result = self._update.optim_step()
        totals = result.totals
        return {
            "value/loss": totals["loss"],
            "value/explained_variance": finish_explained_variance(totals),
            "value/grad_norm": result.grad_norm,
            "value/lr": result.lr,
            "value/clip_fraction": totals["clipped"] / max(totals["tokens"], 1.0),
            **describe_ledgers(result),
        }

    def _compute_value_loss(
        self, settings: None, microbatch: TrainBatch, values: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert microbatch.values is not None and microbatch.returns is not None
        return compute_value_loss(
            values,
            microbatch.values,
            microbatch.returns,
            microbatch.loss_mask,
            microbatch.loss_weights,
            self._value_clip,
        )
