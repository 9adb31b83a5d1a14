# SPDX-License-Identifier: Apache-2.0
"""A teacher: a frozen policy with a path, a layout and ranks of its own, that the policy learns from."""

from __future__ import annotations

from functools import partial

import torch

from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.roles.absent import AbsentRole
from megatron_rl.training.roles.reference import Reference


class Teacher(Reference):
    """A language model without gradients or optimizer; building it is collective."""

    def compute_top_k(self, k: int, vocab_size: int, batch: TrainBatch) -> torch.Tensor:
        """The k likeliest of the first `vocab_size` tokens for each in the loss: [t, 2, k + 1]; 0 elsewhere.

        Ids and log-probs, as `compute_linear_top_k` has them; the same on every rank of the replica.
        """
        return self.model.compute_forward(batch, partial(self.head.compute_top_k, k, vocab_size), 2, k + 1)

    def compute_hidden(self, batch: TrainBatch) -> torch.Tensor:
        """The hidden states that the logits of the tokens in the loss are made of: [t, h] float32; 0 elsewhere."""
        return self.model.compute_forward(batch, self.head.select_hidden, self.model.shape.hidden_size)


class AbsentTeacher(AbsentRole):
    """Stands for a teacher where it is not."""

    def compute_top_k(self, k: int, vocab_size: int, batch: TrainBatch) -> torch.Tensor:
        """Of no token, [0, 2, k + 1]."""
        return batch.loss_weights.new_empty(0, 2, k + 1)

    def compute_hidden(self, batch: TrainBatch) -> torch.Tensor:
        """Of no token, [0, h]."""
        return batch.loss_weights.new_empty(0, self.model.shape.hidden_size)
