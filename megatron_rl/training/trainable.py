# SPDX-License-Identifier: Apache-2.0
"""What actor and critic have in common: DDP, an optimizer, and one optimizer step over a minibatch.

Numbers stay on the device until the step is done, and are read once.
Whether the step may change the weights is decided there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.algorithms.ledger import check_ledger, is_ledger_met, ledger_metrics
from megatron_rl.config.schema import TrainableConfig
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.parallel.collectives import broadcast_tensors, share_object
from megatron_rl.training.cuda_graph import GraphStep
from megatron_rl.training.optimizer import build_trainable
from megatron_rl.training.packed_model import LossFunction, PackedModel
from megatron_rl.training.step import EagerStep, StaticStep, StepLoss
from megatron_rl.training.unsound import explain_lost_gradient, explain_unsound
from megatron_rl.types import LossLedger


class TrainedModel(PackedModel):
    """A PackedModel with DDP, optimizer and learning-rate schedule.

    Attributes:
        role: section of the config, for messages.
        trainable: the DDP wrappers, the optimizer and its schedule.
        runner: how microbatches are run, by `step_mode`.
        optimizer_steps: how many were taken.
    """

    role: str

    def add_optimizer(self, config: TrainableConfig, total_optimizer_steps: int) -> None:
        """Wrap the stages in DDP and build their optimizer; last part of a role's construction, collective."""
        self.runner = self._build_runner(config)
        self.trainable = build_trainable(
            self.stages, self.config, self.groups, config, total_optimizer_steps=total_optimizer_steps,
            stream=self.runner.stream)
        self.modules = list(self.trainable.modules)
        # DDP and the optimizer move parameters into contiguous buffers: take their final storage.
        self.params = {name: p.data for name, p in self.stages.named_parameters()}
        self.optimizer_steps = 0
        self._is_pulled = torch.zeros((), dtype=torch.bool, device=self.trainable.device)

    def _build_runner(self, config: TrainableConfig) -> EagerStep:
        if config.step_mode == "graph":
            return GraphStep(self, config.graph_memory_gib)
        return StaticStep(self) if config.step_mode == "static" else EagerStep(self)

    def release_training_memory(self) -> None:
        """Give back what generation does not need; the next optimizer step takes it back."""
        self.trainable.release()

    def take_optimizer_step(self, minibatch: TrainBatch, loss: StepLoss) -> tuple[dict[str, float], float, float]:
        """Forward, backward and update; collective over the role.

        Returns:
            The loss's metrics summed (or "max/...": their maxima) over microbatches and DP ranks, the global
            gradient norm before clipping, and the learning rate; the same on every rank.

        Raises:
            LedgerError: the loss did not count the tokens or weights that the minibatch has; on every rank.
            UserError: on every rank; the loss or the gradient norm is not finite (the weights are kept), or the norm is
                0 while the loss has a gradient.
        """
        self.trainable.restore()
        self.runner.prepare(minibatch, loss)
        self._is_pulled.zero_()
        self.trainable.zero_grad()
        rows = self.runner.run(minibatch, loss)
        totals = self._reduce(rows, loss, minibatch.tokens.device)
        self.trainable.is_sound.copy_(_is_sound(totals, loss, minibatch.ledgers))
        lr = self.trainable.advance_schedule()
        grad_norm = self.runner.finish()
        *values, norm = torch.cat([totals, grad_norm.double()[None]]).tolist()  # the only wait for the device
        found = dict(zip(loss.metric_names, values, strict=True))
        for ledger in minibatch.ledgers:
            check_ledger(ledger, found["tokens"], found["weights"])
        for quantity, value in (("loss", found["loss"]), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise explain_unsound(
                    quantity, value, self.optimizer_steps + 1, role=self.role, minibatch=minibatch, groups=self.groups,
                    losses=[float(row[loss.metric_names.index("loss")]) for row in rows])
        if norm == 0 and self._is_pulled_anywhere():
            raise explain_lost_gradient(self.optimizer_steps + 1, self.role)
        self.optimizer_steps += 1
        return found, norm, lr

    def forward_step(
        self, loss_function: LossFunction | None, batches: Iterator[TrainBatch], module: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        """`PackedModel.forward_step`; notes whether the loss has a gradient at what the role reads out."""
        watched = loss_function and partial(self._watch, loss_function)
        return super().forward_step(watched, batches, module)

    def _watch(
        self, loss_function: LossFunction, microbatch: TrainBatch, *read_out: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        for values in read_out:
            if values.requires_grad:
                values.register_hook(self._note_gradient)
        return loss_function(microbatch, *read_out)

    def _note_gradient(self, gradient: torch.Tensor) -> None:
        self._is_pulled.logical_or_(gradient.any())  # on the device, and part of a captured step

    def _is_pulled_anywhere(self) -> bool:
        pulled = self._is_pulled.int()
        dist.all_reduce(pulled, op=dist.ReduceOp.MAX, group=self.groups.world)
        return bool(pulled)

    def _reduce(self, rows: list[torch.Tensor], loss: StepLoss, device: torch.device) -> torch.Tensor:
        """Sums and maxima over microbatches and DP ranks, from the last stage to all: [num_metrics] float64."""
        groups = self.groups
        if groups.is_last_stage:
            table = torch.stack(rows)
            sums, highs = table[:, : loss.num_sums].sum(0), table[:, loss.num_sums :].amax(0)
            if groups.dp.size() > 1:
                dist.all_reduce(sums, group=groups.dp)
                if len(highs):
                    dist.all_reduce(highs, op=dist.ReduceOp.MAX, group=groups.dp)
            totals = torch.cat([sums, highs])
        if groups.pp.size() > 1:
            loss.set_names(share_object(loss.metric_names, groups.pp, groups.last_stage_rank))
            if not groups.is_last_stage:
                totals = torch.empty(len(loss.metric_names), dtype=torch.float64, device=device)
            broadcast_tensors([totals], groups.last_stage_rank, groups.pp)
        return totals


def _is_sound(totals: torch.Tensor, loss: StepLoss, ledgers: Sequence[LossLedger]) -> torch.Tensor:
    """0-d bool: the loss is finite and counted what it should; on the device."""
    found = dict(zip(loss.metric_names, totals.unbind(), strict=True))
    sound = found["loss"].isfinite()
    for ledger in ledgers:
        sound = sound & is_ledger_met(ledger, found["tokens"], found["weights"])
    return sound


def describe_ledgers(minibatch: TrainBatch, totals: dict[str, float]) -> dict[str, float]:
    """Numerator and denominator of each loss term of a minibatch, `ledger/...`; empty where none is kept."""
    return {name: value for ledger in minibatch.ledgers for name, value in ledger_metrics(ledger, totals).items()}
