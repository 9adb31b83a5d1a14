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
    """Reference policy made of the actor's base weights, without adapters."""

    def __init__(self, actor: Actor) -> None:
        self.model, self.head = actor.model, actor.head

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Compute log-probs like `Reference`, with adapters disabled."""
        from megatron_rl.models.lora_linears import without_adapters

        with without_adapters(self.model.stages):
            return self.model.compute_forward(batch, self.head)


class NoOptimizer:
    """Stand-in for an optimizer, so that a frozen model can be saved in training checkpoints like a trained one."""

    is_stub_optimizer, steps, kind = True, 0, "adam"

    @property
    def megatron(self) -> Any:
        """Stub optimizer without parameters."""
        return self

    scheduler = megatron

    def state_dict(self) -> dict[str, Any]:
        """Return an empty schedule state."""
        return {}

    def moments(self, main: torch.Tensor) -> tuple[str, ...]:
        """Return no state names."""
        return ()

    def resume(self, steps: int, schedule: Mapping[str, Any]) -> None:
        """Do nothing."""


class Reference:
    """Frozen language model; construction is collective."""

    def __init__(self, setup: RoleSetup) -> None:
        self.model = PackedModel(setup)
        self.head = LogprobHead(self.model, setup.temperature, setup.spec.settings.logprob_chunk_tokens)
        self.optimizer = NoOptimizer()

    @torch.no_grad()
    def become(self, policy: PackedModel) -> None:
        """Copy the weights of a policy in the same layout (ProRL, arXiv 2505.24864)."""
        for mine, theirs in zip(self.model.stages.parameters(), policy.stages.parameters(), strict=True):
            local_values(mine).copy_(local_values(theirs))

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Compute log-probs [t] float32, 0 outside of the loss, on every rank of the replica."""
        return self.model.compute_forward(batch, self.head)
