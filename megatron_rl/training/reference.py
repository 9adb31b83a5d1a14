# SPDX-License-Identifier: Apache-2.0
"""The reference: a frozen policy that scores tokens for the KL term."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.packing.batch import TrainBatch
from megatron_rl.training.policy import Policy


class Reference(Policy):
    """Policy without gradients or optimizer.

    Args:
        *arguments, **options: of `Policy`.
        offload: keep the weights on the host except while it scores.
    """

    def __init__(self, *arguments: Any, offload: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stages.requires_grad_(False)
        if offload:
            self.offload()

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Log-probs of the tokens of a packed batch, [t] float32."""
        with self.on_device():
            return super().compute_logprobs(batch)
