# SPDX-License-Identifier: Apache-2.0
"""Teacher: a frozen policy with its own layout and ranks, from which the policy is distilled."""

from __future__ import annotations

from functools import partial

import torch

from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.roles.absent import AbsentRole
from megatron_rl.training.roles.reference import Reference


class Teacher(Reference):
    """Frozen language model to distill from; construction is collective."""

    def compute_top_k(self, k: int, vocab_size: int, batch: TrainBatch) -> torch.Tensor:
        """Compute ids and log-probs of the k most likely of the first `vocab_size` tokens, [t, 2, k + 1].

        The result is 0 outside of the loss and equal on every rank of the replica; see `compute_linear_top_k`.
        """
        return self.model.compute_forward(batch, partial(self.head.compute_top_k, k, vocab_size), 2, k + 1)

    def compute_hidden(self, batch: TrainBatch) -> torch.Tensor:
        """Return the hidden states that predict the tokens in the loss, [t, h] float32; 0 elsewhere."""
        return self.model.compute_forward(batch, self.head.select_hidden, self.model.shape.hidden_size)


class AbsentTeacher(AbsentRole):
    """Stand-in for a teacher on ranks outside of it."""

    def compute_top_k(self, k: int, vocab_size: int, batch: TrainBatch) -> torch.Tensor:
        """Return an empty tensor, [0, 2, k + 1]."""
        return batch.loss_weights.new_empty(0, 2, k + 1)

    def compute_hidden(self, batch: TrainBatch) -> torch.Tensor:
        """Return an empty tensor, [0, h]."""
        return batch.loss_weights.new_empty(0, self.model.shape.hidden_size)
