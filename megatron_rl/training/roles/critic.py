# SPDX-License-Identifier: Apache-2.0
"""The critic: a model that tells the value of every state, trained towards the returns."""

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
    """A model with a score head and an optimizer, in a layout of its own; building it is collective.

    Args:
        setup: `spec.path` holds a language model (the head starts at zero, and so do all values), or a
            `*ForSequenceClassification` or `*ForTokenClassification` with one label.

    Attributes:
        model, head, optimizer: its parts.
        step: how its microbatches run.
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
        """Values of a packed batch, [t] float32, the same on every rank of the replica.

        `values[i]` is the value of the state in which `tokens[i]` was chosen, of everything before it; 0
        outside of the loss.
        """
        return self.model.compute_forward(batch, self.head)

    def forward_backward(self, minibatch: TrainBatch) -> None:
        """The gradients of the squared distance to `minibatch.returns`, clipped about `minibatch.values`."""
        self._update.forward_backward(minibatch, self._value_loss)

    def optim_step(self) -> dict[str, float]:
        """Use these gradients.

        Returns:
            Metrics, the same on every rank; the explained variance is that of the values before the update.
        """
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
