# SPDX-License-Identifier: Apache-2.0
"""A role on a rank that is not one of its own."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.laid_out import LaidOutModel


class AbsentRole:
    """Stands for a role where it is not: its model by shape and layout, no weights, and nothing to do.

    Its calls return at once. They are made all the same: a report of a hang compares the phases of all ranks.

    Args:
        model: without parameters here.
    """

    policy_version = -1  # of no weights

    def __init__(self, model: LaidOutModel) -> None:
        self.model, self.optimizer = model, self
        self.mtp: AbsentRole | None = None

    def release(self) -> None:
        """There is nothing that generation does not need."""

    def attach_mtp(self, mtp: AbsentRole) -> None:
        """What stands for the layer behind the policy's last one."""
        self.mtp = mtp

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Of no token, [0] float32."""
        return torch.empty_like(batch.loss_weights)

    compute_sum_pi_squared = compute_values = compute_logprobs

    def forward_backward(self, minibatch: TrainBatch, loss: Any = None) -> None:
        """There is nothing to learn."""

    def optim_step(self) -> dict[str, float]:
        """No metrics."""
        return {}
