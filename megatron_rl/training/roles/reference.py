# SPDX-License-Identifier: Apache-2.0
"""The reference: a frozen policy that scores tokens for the KL term."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.models.stages import local_values
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.roles.actor import Actor
from megatron_rl.training.setup import RoleSetup
from megatron_rl.training.token_heads import LogprobHead


class BaseOfActor:
    """The model under the actor's adapters, which shares the actor's weights.

    Attributes:
        model, head: the actor's.
    """

    def __init__(self, actor: Actor) -> None:
        self.model, self.head = actor.model, actor.head

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """As `Reference` does, with the adapters left out."""
        from megatron_rl.models.lora_linears import without_adapters

        with without_adapters(self.model.stages):
            return self.model.compute_forward(batch, self.head)


class NoOptimizer:
    """Stands for the optimizer of a model that is saved and not trained.

    Attributes:
        megatron, scheduler: this object, a stub of either.
        steps: none were taken.
        kind: that of every role by default.
    """

    is_stub_optimizer, steps, kind = True, 0, "adam"

    @property
    def megatron(self) -> Any:
        """A stub: it updates no parameter."""
        return self

    scheduler = megatron

    def state_dict(self) -> dict[str, Any]:
        """There is no schedule."""
        return {}

    def moments(self, main: torch.Tensor) -> tuple[str, ...]:
        """There are none."""
        return ()

    def resume(self, steps: int, schedule: Mapping[str, Any]) -> None:
        """There is nothing to resume."""


class Reference:
    """A language model without gradients; building it is collective.

    Attributes:
        model, head: its parts.
        optimizer: none, as a checkpoint sees it.
    """

    def __init__(self, setup: RoleSetup) -> None:
        self.model = PackedModel(setup)
        self.head = LogprobHead(self.model, setup.temperature, setup.spec.settings.logprob_chunk_tokens)
        self.optimizer = NoOptimizer()

    @torch.no_grad()
    def become(self, policy: PackedModel) -> None:
        """Take over the weights of a policy in the same layout (ProRL, arXiv 2505.24864)."""
        for mine, theirs in zip(self.model.stages.parameters(), policy.stages.parameters(), strict=True):
            local_values(mine).copy_(local_values(theirs))

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Log-probs of the tokens in the loss, [t] float32, the same on every rank of the replica; 0 elsewhere."""
        return self.model.compute_forward(batch, self.head)
