# SPDX-License-Identifier: Apache-2.0
"""What actor and critic have in common: DDP, an optimizer, and one optimizer step over a minibatch."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megatron_rl.algorithms.ledger import check_ledger, ledger_metrics
from megatron_rl.config.schema import TrainableConfig
from megatron_rl.data.batching import TrainBatch
from megatron_rl.parallel.collectives import reduce_scalars, share_object
from megatron_rl.training.optimizer import build_trainable
from megatron_rl.training.packed_model import LossFunction, PackedModel


class TrainedModel(PackedModel):
    """A PackedModel with DDP, optimizer and learning-rate schedule.

    Attributes:
        trainable: the DDP wrappers, the optimizer and its schedule.
        optimizer_steps: how many were taken.
    """

    def add_optimizer(self, config: TrainableConfig, total_optimizer_steps: int) -> None:
        """Wrap the stages in DDP and build their optimizer; last part of a role's construction, collective."""
        self.trainable = build_trainable(
            self.stages, self.config, self.groups, config, total_optimizer_steps=total_optimizer_steps)
        self.modules = list(self.trainable.modules)
        # DDP and the optimizer move parameters into contiguous buffers: take their final storage.
        self.params = {name: p.data for name, p in self.stages.named_parameters()}
        self.optimizer_steps = 0

    def release_training_memory(self) -> None:
        """Give back what generation does not need; the next optimizer step takes it back."""
        self.trainable.release()

    def take_optimizer_step(
        self, minibatch: TrainBatch, loss_function: LossFunction
    ) -> tuple[dict[str, float], float, float]:
        """Forward, backward and update; collective over the role.

        Returns:
            The loss's metrics summed (or "max/...": their maxima) over microbatches and DP ranks, the global
            gradient norm before clipping, and the learning rate; the same on every rank.

        Raises:
            LedgerError: the loss did not count the tokens or weights that the minibatch has; on every rank.
            FloatingPointError: the loss or the gradient norm is not finite; on every rank.
        """
        self.trainable.restore()
        self.trainable.zero_grad()
        per_microbatch = self.run_schedule(minibatch, loss_function)
        totals = self._reduce(per_microbatch, minibatch.tokens.device)
        for ledger in minibatch.ledgers:
            check_ledger(ledger, totals["tokens"], totals["weights"])
        if not math.isfinite(totals["loss"]):
            raise FloatingPointError(f"the loss of optimizer step {self.optimizer_steps + 1} is {totals['loss']}")
        grad_norm, lr = self.trainable.step()
        self.optimizer_steps += 1
        return totals, grad_norm, lr

    def _reduce(self, per_microbatch: list[dict[str, torch.Tensor]], device: torch.device) -> dict[str, float]:
        """Sums and maxima over microbatches and DP ranks, from the last stage to all."""
        totals: dict[str, float] = {}
        if self.groups.is_last_stage:
            stacked = {key: torch.stack([m[key] for m in per_microbatch]) for key in per_microbatch[0]}
            sums = {k: float(v.double().sum()) for k, v in stacked.items() if not k.startswith("max/")}
            highs = {k: float(v.max()) for k, v in stacked.items() if k.startswith("max/")}
            totals = reduce_scalars(sums, dist.ReduceOp.SUM, self.groups.dp, device)
            totals |= reduce_scalars(highs, dist.ReduceOp.MAX, self.groups.dp, device)
        if self.groups.pp.size() == 1:
            return totals
        return share_object(totals, self.groups.pp, self.groups.last_stage_rank)


def describe_ledgers(minibatch: TrainBatch, totals: dict[str, float]) -> dict[str, float]:
    """Numerator and denominator of each loss term of a minibatch, `ledger/...`; empty where none is kept."""
    return {name: value for ledger in minibatch.ledgers for name, value in ledger_metrics(ledger, totals).items()}
