# SPDX-License-Identifier: Apache-2.0
"""The reference: a frozen policy that scores tokens for the KL term."""

from __future__ import annotations

import torch

from megatron_rl.models.lora import without_adapters
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.roles.actor import Actor
from megatron_rl.training.heads import LogprobHead
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.setup import RoleSetup


class BaseOfActor:
    """The model under the actor's adapters, which shares the actor's weights.

    Attributes:
        model, head: the actor's.
    """

    def __init__(self, actor: Actor) -> None:
        self.model, self.head = actor.model, actor.head

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """As `Reference` does, with the adapters left out."""
        with without_adapters(self.model.stages):
            return self.model.compute_forward(batch, self.head)


class Reference:
    """A language model without gradients or optimizer; building it is collective.

    Attributes:
        model, head: its parts.
    """

    def __init__(self, setup: RoleSetup) -> None:
        self.model = PackedModel(setup)
        self.head = LogprobHead(self.model, setup.temperature, setup.spec.layout.logprob_chunk_tokens)

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Log-probs of the tokens in the loss, [t] float32, the same on every rank of the replica; 0 elsewhere."""
        return self.model.compute_forward(batch, self.head)
