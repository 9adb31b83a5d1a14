# SPDX-License-Identifier: Apache-2.0
"""Roles that do not learn on this rank: reference, teachers, reward model, and the stand-in for a role of other ranks.

Also policies that score a few sequences outside of a step's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.models.stages import local_values
from megatron_rl.parallel.collectives import share_object, world
from megatron_rl.samples.batch import Padding, TrainBatch, build_train_batch
from megatron_rl.samples.experience import Experience
from megatron_rl.samples.microbatches import plan_microbatches
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.roles.actor import Actor
from megatron_rl.training.roles.on_samples import RoleOnSamples
from megatron_rl.training.setup import LaidOutModel, RoleSetup
from megatron_rl.training.token_heads import LogprobHead, compute_scores
from megatron_rl.types import Branch, Rollout


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
    """Stand-in for an optimizer, so that training checkpoints can contain a frozen model."""

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


class Teacher(Reference):
    """Frozen language model to distill from; construction is collective."""

    def compute_top_k(self, k: int, vocab_size: int, batch: TrainBatch) -> torch.Tensor:
        """Compute ids and log-probs of the k most likely of the first `vocab_size` tokens, [t, 2, k + 1].

        The last entry stands for all other tokens. 0 outside of the loss; equal on every rank of the replica.
        """
        return self.model.compute_forward(batch, partial(self.head.compute_top_k, k, vocab_size), 2, k + 1)

    def compute_hidden(self, batch: TrainBatch) -> torch.Tensor:
        """Return the hidden states that predict the tokens in the loss, [t, h] float32; 0 elsewhere."""
        return self.model.compute_forward(batch, self.head.select_hidden, self.model.shape.hidden_size)


class RewardModel:
    """Frozen model with a score head; construction is collective."""

    def __init__(self, setup: RoleSetup) -> None:
        self.model = PackedModel(setup)
        self.head = partial(compute_scores, self.model)

    def compute_scores(self, batch: TrainBatch) -> torch.Tensor:
        """Compute the score at the last token of every sequence, [num_rollouts] float32 on every rank; collective.

        transformers instead scores the last token that is not `pad_token_id`: the same, unless a sequence ends in that
        token.

        Args:
            batch: this DP rank's share; over all DP ranks, each of the rollouts 0, 1, ... appears once.
        """
        scores, group = self.model.compute_forward(batch, self.head), self.model.groups.dp
        ends = torch.cat([piece.start + piece.cu_seqlens[1:].long() - 1 for piece in batch.slices])
        ids = batch.sequence_ids[ends]
        ends, ids = ends[ids >= 0], ids[ids >= 0]
        count = batch.sequence_ids.max() + 1
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
        table = torch.zeros(int(count), dtype=torch.float32, device=scores.device)
        table[ids] = scores[ends]
        dist.all_reduce(table, group=group)
        return table


def score_sequences(
    policy: PackedModel, sequences: Sequence[np.ndarray], skip: Sequence[int], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Compute log-probs of the tokens from `skip` on; every DP replica scores all sequences. Collective.

    Args:
        sequences: [s] int32 each.
        skip: unscored leading tokens per sequence.
    """
    packed = [Branch.of_response(tokens, first) for tokens, first in zip(sequences, skip, strict=True)]
    lengths = [len(tokens) for tokens in sequences]
    plan = plan_microbatches(
        lengths, dp_size=1, max_tokens=max(lengths), count_multiple=policy.microbatch_count_multiple
    )
    batch = build_train_batch(
        packed,
        [0.0] * len(packed),
        [(range(len(packed)), plan)],
        dp_rank=0,
        padding=Padding(policy.pad_multiple),
        device=policy.device,
    )
    logprobs = policy.compute_forward(batch, LogprobHead(policy, temperature))
    return [logprobs[(batch.sequence_ids == i) & batch.loss_mask].cpu() for i in range(len(packed))]


class RewardModelOnSamples(RoleOnSamples):
    """Reward model that works on a step's samples."""

    def __call__(self, samples: Experience) -> np.ndarray:
        """Return the score at the end of each rollout, [num_rollouts] float64, equal on every rank."""
        batch, layout = self.read(samples), self.packer.model.layout
        scores = self.role.compute_scores(batch).double().cpu().numpy() if self.is_here else None
        if layout.world_size < world().size():
            scores = share_object(scores, world(), layout.first_rank)
        assert scores is not None
        return scores[np.append(samples.headers.first_of_rollout[1:], len(samples.headers)) - 1]


def score_all_rollouts(
    score: Callable[[Sequence[Rollout]], Sequence[float]], decode: Callable[[list[int]], str], samples: Experience
) -> Sequence[float]:
    """Apply a scoring function to all rollouts on every rank; collective."""
    rollouts = samples.fetch_rollouts(range(len(samples.rewards)), decode, on_all=True)
    return score([rollout for rollout, _ in rollouts])


class AbsentRole:
    """Stand-in for a role on a rank outside of it, without weights.

    Its methods are called nonetheless: hang reports compare how far each rank has come.
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

    def compute_top_k(self, k: int, vocab_size: int, batch: TrainBatch) -> torch.Tensor:
        """Return an empty tensor, [0, 2, k + 1]."""
        return batch.loss_weights.new_empty(0, 2, k + 1)

    def compute_hidden(self, batch: TrainBatch) -> torch.Tensor:
        """Return an empty tensor, [0, h]."""
        return batch.loss_weights.new_empty(0, self.model.shape.hidden_size)

    def forward_backward(self, minibatch: TrainBatch, loss: Any = None) -> None:
        """Do nothing."""

    def optim_step(self) -> dict[str, float]:
        """Return no metrics."""
        return {}
