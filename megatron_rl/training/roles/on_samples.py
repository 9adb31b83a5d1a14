# SPDX-License-Identifier: Apache-2.0
"""Roles for the main loop: wrappers that pack samples, run a role, and store its results as columns.

All ranks make the same calls. Ranks that a role does not use only exchange columns, so roles on disjoint ranks run
concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from megatron_rl.algorithms.catalog import find_early_reader_of_loss
from megatron_rl.algorithms.losses import compute_sft_loss
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.parallel.collectives import broadcast_tensors
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.samples.experience import Column, Experience, Minibatch, check_kind
from megatron_rl.samples.fetch import Holders
from megatron_rl.samples.pack import Packer
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.roles.actor import LossFunction
from megatron_rl.types import UserError

_READ_BY_UPDATE = (
    *("old_logprobs", "ref_logprobs", "advantages", "importance_weights", "chosen"),
    *("teacher_top_k", "teacher_hidden", "update_logprobs", "update_entropy"),
)


class RoleOnSamples:
    """Role that works on a step's samples; methods that take samples are collective over all ranks.

    Attributes:
        model: with weights only on the role's ranks.
        is_here: whether this rank belongs to the role.
    """

    def __init__(self, role: Any, packer: Packer) -> None:
        self.role, self.packer, self.is_here = role, packer, packer.model.dp_rank is not None
        self.model: PackedModel = role.model

    def read(self, samples: Experience, *names: str) -> TrainBatch:
        """Return this rank's share of the samples, with the named columns that exist."""
        return samples.read(self.packer, names)

    def minibatches(self, samples: Experience, epochs: int = 1) -> Iterator[Minibatch]:
        """Yield one minibatch per optimizer step, over `epochs` passes."""
        check_kind(samples, Experience, "policy.minibatches(samples, epochs)")
        check_kind(epochs, int, "policy.minibatches(samples, epochs)", "a whole number")
        for _ in range(epochs):
            for index in range(len(samples.pack(self.packer).batch.minibatch_sizes)):
                yield Minibatch(samples, index)

    def as_column(self, samples: Experience, values: torch.Tensor | None) -> Column | None:
        """Wrap values [t] of the role's batch as a column; `None` stays `None`."""
        return None if values is None else Column(values, samples.pack(self.packer))

    def compute(self, function: Callable[[TrainBatch], torch.Tensor], samples: Experience) -> Column:
        """Apply a function to the role's batch; return a column."""
        check_kind(samples, Experience, "logprobs(samples), values(samples)")
        return Column(function(self.read(samples)), samples.pack(self.packer))

    def optim_step(self) -> dict[str, float]:
        """Update the weights of a trained role; return metrics, equal on the role's ranks."""
        return self.role.optim_step()

    def _read_minibatch(self, minibatch: Minibatch, names: Sequence[str]) -> TrainBatch:
        """Return this rank's share of a minibatch; empty outside of the role."""
        batch = self.read(minibatch.samples, *names)
        return batch.minibatch(minibatch.index) if self.is_here else batch


class PolicyOnSamples(RoleOnSamples):
    """Role that scores tokens: reference and actor."""

    def logprobs(self, samples: Experience) -> Column:
        """Compute log-probs of the tokens in the loss; 0 elsewhere."""
        return self.compute(self.role.compute_logprobs, samples)


class ActorOnSamples(PolicyOnSamples):
    """Trained policy that works on a step's samples.

    Attributes:
        records_routes: `logprobs` records the chosen experts, which updates replay.
    """

    def __init__(self, role: Any, packer: Packer) -> None:
        super().__init__(role, packer)
        self.records_routes = getattr(packer.config, "router_replay", "off") == "trainer"

    def read(self, samples: Experience, *names: str) -> TrainBatch:
        """Return this rank's share of the samples, with the expert choices to replay, if there are any."""
        packing = samples.pack(self.packer)
        if samples.replayed_routes is None and packing.routes is not None:
            samples.replayed_routes = Column(packing.routes, packing)
        return super().read(samples, *names, "replayed_routes")

    def logprobs(self, samples: Experience) -> Column:
        """Compute log-probs of the tokens in the loss, and record expert choices if updates replay them."""
        if not (self.records_routes and self.is_here and samples.replayed_routes is None):
            return super().logprobs(samples)
        batch = self.role.record_routes(self.read(samples))
        found = self.as_column(samples, self.role.compute_logprobs(batch))
        samples.replayed_routes = self.as_column(samples, batch.routes_used)
        assert found is not None
        return found

    def sum_pi_squared(self, samples: Experience) -> Column:
        """Compute the sum over the vocabulary of squared probabilities."""
        return self.compute(self.role.compute_sum_pi_squared, samples)

    def as_update(self, samples: Experience, values: torch.Tensor) -> Column:
        """Wrap values [t], valid on the last pipeline stage only, as a column."""
        packing, layout = samples.pack(self.packer), self.packer.model.layout
        last_stage = [[layout.rank(dp=dp, pp=layout.pp_size - 1)] for dp in range(layout.dp_size)]
        return Column(values, packing, Holders(packing.holders.replica_of, np.array(last_stage)))

    def forward_backward(self, minibatch: Minibatch, loss: AlgorithmConfig | LossFunction) -> None:
        """Compute the gradients of a policy loss, or of a function (see `roles.actor.LossFunction`), over a minibatch.

        A policy loss also records its log-probs and entropies, and `old_logprobs` if they are missing.

        Raises:
            UserError: `old_logprobs` are missing and needed before the first pass; on every rank.
        """
        check_kind(minibatch, Minibatch, "forward_backward(minibatch, loss)")
        check_kind(loss, AlgorithmConfig if not callable(loss) else object, "forward_backward(minibatch, loss)")
        samples = minibatch.samples
        if isinstance(loss, AlgorithmConfig):
            self._make_room(samples, loss)
        self.role.forward_backward(self._read_minibatch(minibatch, _READ_BY_UPDATE), loss)
        if isinstance(loss, AlgorithmConfig) and samples.old_logprobs is None:
            seen = samples.update_logprobs.values.clone()
            if self.is_here:
                groups = self.model.groups
                broadcast_tensors([seen], groups.last_stage_rank, groups.pp)
            samples.old_logprobs = self.as_column(samples, seen)

    def _make_room(self, samples: Experience, loss: AlgorithmConfig) -> None:
        """Allocate columns that the last stage fills during an update."""
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


def sft(
    microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the negative log-likelihood of the tokens in the loss."""
    return compute_sft_loss(logprobs, microbatch.loss_mask, microbatch.loss_weights)
