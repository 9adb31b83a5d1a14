# SPDX-License-Identifier: Apache-2.0
"""Stand-in for a role on ranks outside of it."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.laid_out import LaidOutModel


class AbsentRole:
    """Stand-in for a role on a rank outside of it, without weights.

    Its methods are called nonetheless, because hang reports compare the phases of all ranks.
    """

    policy_version = -1  # no weights

    def __init__(self, model: LaidOutModel) -> None:
        self.model, self.optimizer = model, self
        self.mtp: AbsentRole | None = None

    def release(self) -> None:
        """Do nothing."""

    def attach_mtp(self, mtp: AbsentRole) -> None:
        """Set the stand-in for the policy's MTP layer."""
        self.mtp = mtp

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Return an empty tensor, [0] float32."""
        return torch.empty_like(batch.loss_weights)

    compute_sum_pi_squared = compute_values = compute_logprobs

    def forward_backward(self, minibatch: TrainBatch, loss: Any = None) -> None:
        """Do nothing."""

    def optim_step(self) -> dict[str, float]:
        """Return no metrics."""
        return {}
