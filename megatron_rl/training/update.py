# SPDX-License-Identifier: Apache-2.0
"""One optimizer step over a minibatch, the same for every role that is trained.

Numbers stay on the device until the step is done, and are read once.
Whether the step may change the weights is decided there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_rl.algorithms.ledger import check_ledger, is_ledger_met, ledger_metrics
from megatron_rl.config.schema import TrainedConfig
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.parallel.collectives import broadcast_tensors, share_object
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.training.cuda_graph import GraphStep
from megatron_rl.training.optimizer import Optimizer
from megatron_rl.training.packed_model import Head, PackedModel
from megatron_rl.training.step import EagerStep, StaticStep, StepLoss
from megatron_rl.training.unsound import explain_lost_gradient, explain_unsound
from megatron_rl.types import LossLedger


def build_step(model: PackedModel, head: Head, optimizer: Optimizer, config: TrainedConfig) -> EagerStep:
    """How the microbatches of a role run, by `step_mode`."""
    if config.step_mode == "graph":
        return GraphStep(model, head, optimizer, config.graph_memory_gib)
    return (StaticStep if config.step_mode == "static" else EagerStep)(model, head, optimizer)


def take_optimizer_step(
    step: EagerStep, minibatch: TrainBatch, loss: StepLoss, role: str
) -> tuple[dict[str, float], float, float]:
    """Forward, backward and update; collective over the role.

    Args:
        step: of the role.
        minibatch: of this rank.
        loss: what is made smaller.
        role: section of the config, for messages.

    Returns:
        The loss's metrics summed (or "max/...": their maxima) over microbatches and DP ranks, the global
        gradient norm before clipping, and the learning rate; the same on every rank.

    Raises:
        LedgerError: the loss did not count the tokens or weights that the minibatch has; on every rank.
        UserError: on every rank; the loss or the gradient norm is not finite (the weights are kept), or the norm is
            0 while the loss has a gradient.
    """
    optimizer, groups = step.optimizer, step.model.groups
    optimizer.restore()
    step.prepare(minibatch, loss)
    loss.is_pulled.zero_()
    optimizer.zero_grad()
    rows = step.run(minibatch, loss)
    totals = _reduce(rows, loss, groups, minibatch.tokens.device)
    optimizer.is_sound.copy_(_is_sound(totals, loss, minibatch.ledgers))
    lr = optimizer.advance_schedule()
    grad_norm = step.finish()
    *values, norm = torch.cat([totals, grad_norm.double()[None]]).tolist()  # the only wait for the device
    found = dict(zip(loss.metric_names, values, strict=True))
    for ledger in minibatch.ledgers:
        check_ledger(ledger, found["tokens"], found["weights"])
    for quantity, value in (("loss", found["loss"]), ("gradient norm", norm)):
        if not math.isfinite(value):
            raise explain_unsound(
                quantity, value, optimizer.steps + 1, role=role, minibatch=minibatch, groups=groups,
                losses=[float(row[loss.metric_names.index("loss")]) for row in rows])
    if norm == 0 and _is_pulled_anywhere(loss, groups.world):
        raise explain_lost_gradient(optimizer.steps + 1, role)
    optimizer.count_step()
    return found, norm, lr


def _is_pulled_anywhere(loss: StepLoss, group: dist.ProcessGroup) -> bool:
    pulled = loss.is_pulled.int()
    dist.all_reduce(pulled, op=dist.ReduceOp.MAX, group=group)
    return bool(pulled)


def _reduce(rows: list[torch.Tensor], loss: StepLoss, groups: ParallelGroups, device: torch.device) -> torch.Tensor:
    """Sums and maxima over microbatches and DP ranks, from the last stage to all: [num_metrics] float64."""
    totals = torch.empty(0, dtype=torch.float64, device=device)
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
