# SPDX-License-Identifier: Apache-2.0
"""Roles as the main loop calls them: they are given samples, pack them privately, and leave columns behind.

Every rank makes the same calls. On a rank that is not one of a role's own, its calls take part in the exchange of
columns and return: roles on different ranks work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from megatron_rl.algorithms.losses import compute_sft_loss
from megatron_rl.algorithms.old_logprobs import find_early_reader_of_loss
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.parallel.collectives import broadcast_tensors, share_object, world
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.samples.experience import Column, Experience, Minibatch
from megatron_rl.samples.fetch import Holders
from megatron_rl.samples.pack import Packer
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.roles.actor import LossFunction
from megatron_rl.types import Rollout, UserError


class RoleOnSamples:
    """A role with its way of packing; the methods that take samples are collective over all ranks.

    Attributes:
        role: works on packed batches.
        packer: packs for it.
    """

    def __init__(self, role: Any, packer: Packer) -> None:
        self.role, self.packer = role, packer

    @property
    def model(self) -> PackedModel:
        """The role's model, on its own ranks."""
        return self.role.model

    @property
    def is_here(self) -> bool:
        """True on the role's own ranks."""
        return self.packer.model.dp_rank is not None

    def read(self, samples: Experience, *names: str) -> TrainBatch:
        """Its share of the samples, with some columns where there are such."""
        return samples.read(self.packer, names)

    def describe_packing(self, samples: Experience) -> dict[str, float]:
        """Metrics of its packing."""
        return samples.pack(self.packer).metrics

    def minibatches(self, samples: Experience, epochs: int = 1) -> Iterator[Minibatch]:
        """One per optimizer step, each of `plan.rollouts_per_minibatch` rollouts, in as many passes as epochs."""
        for _ in range(epochs):
            for index in range(len(samples.pack(self.packer).batch.minibatch_sizes)):
                yield Minibatch(samples, index)

    def as_column(self, samples: Experience, values: torch.Tensor | None) -> Column | None:
        """Values [t] of its batch as a column of the samples; None stays None."""
        return None if values is None else Column(values, samples.pack(self.packer))

    def compute(self, function: Callable[[TrainBatch], torch.Tensor], samples: Experience) -> Column:
        """The column that a function of its batch makes."""
        return Column(function(self.read(samples)), samples.pack(self.packer))

    def _read_minibatch(self, minibatch: Minibatch, names: Sequence[str] = ()) -> TrainBatch:
        """Its share of a minibatch; no token where the role is not."""
        batch = self.read(minibatch.samples, *names)
        return batch.minibatch(minibatch.index) if self.is_here else batch


class PolicyOnSamples(RoleOnSamples):
    """Scores tokens: the reference, and what the actor has in common with it."""

    def logprobs(self, samples: Experience) -> Column:
        """Log-probs of the tokens in the loss; 0 elsewhere."""
        return self.compute(self.role.compute_logprobs, samples)


class ActorOnSamples(PolicyOnSamples):
    """The policy in training.

    Attributes:
        records_routes: updates replay the experts that `logprobs` chose.
    """

    def __init__(self, role: Any, packer: Packer) -> None:
        super().__init__(role, packer)
        self.records_routes = getattr(packer.config, "router_replay", "off") == "trainer"

    def read(self, samples: Experience, *names: str) -> TrainBatch:
        """Its share of the samples, with the experts to replay where they are known."""
        packing = samples.pack(self.packer)
        if samples.replayed_routes is None and packing.routes is not None:
            samples.replayed_routes = Column(packing.routes, packing)
        return super().read(samples, *names, "replayed_routes")

    def logprobs(self, samples: Experience) -> Column:
        """Log-probs of the tokens in the loss, 0 elsewhere; the experts chosen for them are noted to be replayed."""
        if not (self.records_routes and self.is_here and samples.replayed_routes is None):
            return super().logprobs(samples)
        batch = self.role.record_routes(self.read(samples))
        found = self.as_column(samples, self.role.compute_logprobs(batch))
        samples.replayed_routes = self.as_column(samples, batch.routes_used)
        assert found is not None
        return found

    def sum_pi_squared(self, samples: Experience) -> Column:
        """Sum over the vocabulary of squared probabilities where the tokens in the loss came from."""
        return self.compute(self.role.compute_sum_pi_squared, samples)

    def as_update(self, samples: Experience, values: torch.Tensor) -> Column:
        """Values [t] that only the last pipeline stage knows, as a column."""
        packing, layout = samples.pack(self.packer), self.packer.model.layout
        last_stage = [[layout.rank(dp=dp, pp=layout.pp_size - 1)] for dp in range(layout.dp_size)]
        return Column(values, packing, Holders(packing.holders.replica_of, np.array(last_stage)))

    def forward_backward(self, minibatch: Minibatch, loss: AlgorithmConfig | LossFunction) -> None:
        """The gradients of a policy loss, or of a function (see `roles.actor.LossFunction`), over a minibatch.

        A policy loss gives the samples what it has seen of the policy, and `old_logprobs` where they have none.

        Raises:
            UserError: they have none, and the loss needs them before its first pass; on every rank.
        """
        samples = minibatch.samples
        if isinstance(loss, AlgorithmConfig):
            self._make_room(samples, loss)
        self.role.forward_backward(
            self._read_minibatch(
                minibatch,
                (
                    "old_logprobs",
                    "ref_logprobs",
                    "advantages",
                    "importance_weights",
                    "chosen",
                    "teacher_top_k",
                    "teacher_hidden",
                    "update_logprobs",
                    "update_entropy",
                ),
            ),
            loss,
        )
        if isinstance(loss, AlgorithmConfig) and samples.old_logprobs is None:
            seen = samples.update_logprobs.values.clone()
            if self.is_here:
                groups = self.model.groups
                broadcast_tensors([seen], groups.last_stage_rank, groups.pp)
            samples.old_logprobs = self.as_column(samples, seen)

    def _make_room(self, samples: Experience, loss: AlgorithmConfig) -> None:
        """For what the last stage will see of the policy in an update."""
        batch = self.read(samples)
        has_branches = len(samples.headers) > len(samples.headers.rollouts)
        reader = find_early_reader_of_loss(loss, len(batch.minibatch_sizes), has_branches=has_branches)
        if samples.old_logprobs is None and reader:
            raise UserError(
                f"an update of samples without old_logprobs, and {reader}",
                source="samples.old_logprobs",
                expected="the log-probs of the policy before the update",
                hint="set samples.old_logprobs = policy.logprobs(samples)",
            )
        if samples.update_logprobs is None:
            nothing = torch.full_like(batch.rollout_logprobs, torch.nan)
            samples.update_logprobs = self.as_update(samples, nothing)
            samples.update_entropy = self.as_update(samples, nothing.clone())

    def optim_step(self) -> dict[str, float]:
        """Update the weights with these gradients; returns metrics, the same on all of the role's ranks."""
        return self.role.optim_step()


def sft(
    microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of supervised fine-tuning: the negative log-likelihood of the tokens in the loss."""
    return compute_sft_loss(logprobs, microbatch.loss_mask, microbatch.loss_weights)


class CriticOnSamples(RoleOnSamples):
    """Tells the value of every state."""

    def values(self, samples: Experience) -> Column:
        """The value of the state in which each token in the loss was chosen; 0 elsewhere."""
        return self.compute(self.role.compute_values, samples)

    def forward_backward(self, minibatch: Minibatch) -> None:
        """The gradients of the distance to the returns over a minibatch."""
        self.role.forward_backward(self._read_minibatch(minibatch, ("values", "returns")))

    def optim_step(self) -> dict[str, float]:
        """Update the weights with these gradients; returns metrics, the same on all of the role's ranks."""
        return self.role.optim_step()


class RewardModelOnSamples(RoleOnSamples):
    """Scores whole responses."""

    def __call__(self, samples: Experience) -> np.ndarray:
        """The score at the end of each rollout, [num_rollouts] float64; the same on every rank."""
        batch, layout = self.read(samples), self.packer.model.layout
        scores = self.role.compute_scores(batch).double().cpu().numpy() if self.is_here else None
        if layout.world_size < world().size():
            scores = share_object(scores, world(), layout.first_rank)
        assert scores is not None
        return scores[np.append(samples.headers.first_of_rollout[1:], len(samples.headers)) - 1]


def score_all_rollouts(
    score: Callable[[Sequence[Rollout]], Sequence[float]], decode: Callable[[list[int]], str], samples: Experience
) -> Sequence[float]:
    """The scores of a function that is handed all rollouts on every rank; collective."""
    rollouts = samples.fetch_rollouts(range(len(samples.rewards)), decode, on_all=True)
    return score([rollout for rollout, _ in rollouts])
