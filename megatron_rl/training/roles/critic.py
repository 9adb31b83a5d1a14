# SPDX-License-Identifier: Apache-2.0
"""The critic: a value model trained towards the returns."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megatron_rl.config.schema import CriticConfig
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.samples.experience import Column, Experience, Minibatch
from megatron_rl.training.optimizer import Optimizer, OptimizerStep, StepLoss, describe_ledgers
from megatron_rl.training.packed_model import PackedModel, compute_values
from megatron_rl.training.roles.actor import RoleOnSamples, build_step
from megatron_rl.training.setup import RoleSetup


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
        self.head = partial(compute_values, self.model)
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
        """Add the gradients of the squared error to `minibatch.returns`, clipped around `minibatch.values`."""
        self._update.forward_backward(minibatch, self._value_loss)

    def optim_step(self, **given: Any) -> dict[str, float]:
        """Update the weights and return metrics; the explained variance refers to the values before the update."""
        result = self._update.optim_step(**given)
        if result is None:
            return {}
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
        old_values, returns = microbatch.column("values"), microbatch.column("returns")
        mask, weights = microbatch.loss_mask, microbatch.loss_weights
        return compute_value_loss(values, old_values, returns, mask, weights, self._value_clip)


class CriticOnSamples(RoleOnSamples):
    """Critic that works on a step's samples."""

    def values(self, samples: Experience) -> Column:
        """Compute the value before each token in the loss; 0 elsewhere."""
        return self.compute(self.role.compute_values, samples)

    def forward_backward(self, minibatch: Minibatch) -> None:
        """Add the gradients of the value loss over a minibatch."""
        self.role.forward_backward(self._read_minibatch(minibatch, ("values", "returns")))


_CONSTANT = 1e-12  # relative to the mean square: below float32's resolution, returns are constant


def compute_value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_weights: torch.Tensor,
    value_clip: float | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the squared error with clipped values (PPO as in arXiv 2005.12729, section 3, item 1).

        loss = sum_t w_t max((V_t - R_t)^2, (clip(V_t, V_old - c, V_old + c) - R_t)^2) / 2

    Args:
        values: [t], differentiable.
        old_values: [t] before the update.
        returns: [t] targets.
        loss_mask: [t] bool; masked tokens are ignored.
        loss_weights: [t], 0 at masked positions.
        value_clip: c, or `None` for the plain squared error.

    Returns:
        The loss (scalar) and sums over tokens: "loss", "clipped" (tokens without gradient because of the clip),
        "tokens", "weights", and float64 moments of returns and of error = returns - old_values.
    """
    values, old_values, returns = (torch.where(loss_mask, x, 0.0) for x in (values, old_values, returns))
    square = (values - returns).square()
    is_clipped = torch.zeros_like(loss_mask)
    if value_clip is not None:
        # Not old + clamp(new - old), which would change the bits of values inside the bounds.
        bounded = torch.clamp(values, old_values - value_clip, old_values + value_clip)
        bounded_square = (bounded - returns).square()
        is_clipped, square = bounded_square > square, torch.maximum(square, bounded_square)
    loss = (loss_weights * torch.where(loss_mask, 0.5 * square, 0.0)).sum()

    with torch.no_grad():
        error = returns.double() - old_values.double()
        metrics = {
            "loss": loss.detach(),
            "clipped": is_clipped.sum().float(),
            "tokens": loss_mask.sum().float(),
            "weights": torch.where(loss_mask, loss_weights, 0.0).sum(),
            "returns": returns.double().sum(),
            "returns2": returns.double().square().sum(),
            "error": error.sum(),
            "error2": error.square().sum(),
        }
    return loss, metrics


def finish_explained_variance(sums: dict[str, float]) -> float:
    """Return 1 - Var(returns - old values) / Var(returns) from global sums; 0 if the returns do not vary."""
    tokens = max(sums["tokens"], 1.0)
    variance, error_variance = (sums[f"{name}2"] / tokens - (sums[name] / tokens) ** 2 for name in ("returns", "error"))
    if variance <= _CONSTANT * sums["returns2"] / tokens:
        return 0.0
    return 1.0 - max(error_variance, 0.0) / variance
