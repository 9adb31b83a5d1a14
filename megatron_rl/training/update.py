# SPDX-License-Identifier: Apache-2.0
"""One optimizer step over one or more minibatches, shared by all trained roles, with a single host sync."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.algorithms.aggregation import check_ledger, is_ledger_met, ledger_metrics
from megatron_rl.config.schema import TrainedConfig
from megatron_rl.parallel.collectives import broadcast_tensors
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.optimizer import EagerStep, Optimizer, StepLoss
from megatron_rl.training.packed_model import Head, PackedModel


def build_step(model: PackedModel, head: Head, optimizer: Optimizer, config: TrainedConfig) -> EagerStep:
    """Build the microbatch runner for the configured `step_mode`."""
    if config.step_mode == "graph":
        from megatron_rl.training.cuda_graph import GraphStep, StageGraphStep

        kind = StageGraphStep if model.layout.pp_size > 1 else GraphStep
        return kind(model, head, optimizer, config.graph_memory_gib)
    if config.step_mode == "static":
        from megatron_rl.training.static_step import StaticStep

        return StaticStep(model, head, optimizer)
    return EagerStep(model, head, optimizer)


@dataclass(frozen=True)
class Pass:
    """Gradients of one minibatch, not yet applied; `totals`: of `loss.metric_names`, equal on every rank."""

    minibatch: TrainBatch
    loss: StepLoss
    rows: list[torch.Tensor]
    totals: dict[str, Any]


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step, equal on every rank except for the minibatches.

    Attributes:
        passes: minibatches whose gradients were added, with their totals.
        totals: metrics over passes, microbatches and DP ranks: sums, or maxima for "max/...".
        grad_norm: global gradient norm before clipping.
        loss: of the last pass.
        adapter_norm: norm of the adapters after the step; `None` without adapters.
    """

    passes: list[Pass]
    totals: dict[str, float]
    grad_norm: float
    lr: float
    loss: StepLoss
    adapter_norm: float | None = None


class OptimizerStep:
    """Optimizer step of a role over the minibatches since the last one; each call is collective over the role."""

    def __init__(self, step: EagerStep, role: str) -> None:
        self._step, self._role = step, role
        self.passes: list[Pass] = []

    def forward_backward(self, minibatch: TrainBatch, loss: StepLoss) -> None:
        """Add the gradients of a loss over a minibatch to those since the last step.

        A call that fails drops all gradients.

        Raises:
            UserError: a second call before `optim_step`, and the first has reduced its gradients; on every rank.
        """
        step, optimizer = self._step, self._step.optimizer
        passes, self.passes = self.passes if optimizer.has_gradients else [], []
        if passes and any(stage.ddp_config.overlap_grad_reduce for stage in step.model.ddp):
            from megatron_rl.training.step_failures import refuse_second_pass

            raise refuse_second_pass(self._role)
        optimizer.restore()
        step.prepare(minibatch, loss, adds=bool(passes))
        if not passes:
            if step.model.routing is not None:
                step.model.routing.clear()
            optimizer.zero_grad()
        if all(earlier.loss is not loss for earlier in passes):
            loss.is_pulled.zero_()
        rows = step.run(minibatch, loss)
        totals = _reduce(rows, loss, step.model.groups, minibatch.tokens.device)
        found = dict(zip(loss.metric_names, totals.unbind(), strict=True))
        self.passes = [*passes, Pass(minibatch, loss, rows, found)]

    def optim_step(self, **given: Any) -> StepResult | None:
        """Update the weights with the accumulated gradients; without any, change nothing and return `None`.

        Args:
            given: settings of this step only; see `Optimizer.advance_schedule`.

        Raises:
            LedgerError: the loss did not count the minibatch's tokens or weights; on every rank.
            UserError: a non-finite loss or gradient norm (the weights are kept), or a norm of 0 although the loss has a
                gradient; on every rank.
        """
        optimizer, groups = self._step.optimizer, self._step.model.groups
        passes, self.passes = self.passes if optimizer.has_gradients else [], []
        if not passes:
            return None
        optimizer.restore()
        is_sound = torch.ones_like(optimizer.is_sound)
        for one in passes:
            is_sound = is_sound & one.totals["loss"].isfinite()
            for ledger in one.minibatch.ledgers:
                is_sound = is_sound & is_ledger_met(ledger, one.totals["tokens"], one.totals["weights"])
        optimizer.is_sound.copy_(is_sound)
        lr = optimizer.advance_schedule(**given)
        grad_norm = self._step.finish()
        adapters: Any = self._step.model.trained
        moved = [] if self._step.model.adapters is None else [adapters.measure_norm()]
        totals = [value for one in passes for value in one.totals.values()]
        read = iter(torch.stack([x.double() for x in (*totals, grad_norm, *moved)]).tolist())  # the only host sync
        passes = [replace(one, totals={name: next(read) for name in one.totals}) for one in passes]
        norm, *moved = read
        for one in passes:
            for ledger in one.minibatch.ledgers:
                check_ledger(ledger, one.totals["tokens"], one.totals["weights"])
        bad = next((one for one in passes if not math.isfinite(one.totals["loss"])), passes[-1])
        if not (math.isfinite(norm) and math.isfinite(bad.totals["loss"])):
            from megatron_rl.training.step_failures import explain_unsound

            raise explain_unsound(bad, norm, optimizer.steps + 1, self._role, groups)
        if norm == 0:
            is_pulled = torch.stack([one.loss.is_pulled for one in passes]).any().int()
            dist.all_reduce(is_pulled, op=dist.ReduceOp.MAX, group=groups.world)
            if is_pulled:
                from megatron_rl.training.step_failures import explain_zero_norm

                raise explain_zero_norm(optimizer.steps + 1, self._role)
        optimizer.count_step()
        return StepResult(passes, _join_totals(passes), norm, lr, passes[-1].loss, *moved)


def _join_totals(passes: list[Pass]) -> dict[str, float]:
    found = passes[0].totals
    for one in passes[1:]:
        for name, value in one.totals.items():
            join: Any = max if name.startswith("max/") else sum
            found = found | {name: join((found[name], value)) if name in found else value}
    return found


def _reduce(rows: list[torch.Tensor], loss: StepLoss, groups: ParallelGroups, device: torch.device) -> torch.Tensor:
    """Reduce metrics over microbatches, DP and stages: [num_metrics] float64."""
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
        loss.share_names(groups.pp, groups.last_stage_rank)
        if not groups.is_last_stage:
            totals = torch.empty(len(loss.metric_names), dtype=torch.float64, device=device)
        broadcast_tensors([totals], groups.last_stage_rank, groups.pp)
    return totals


def describe_ledgers(result: StepResult) -> dict[str, float]:
    """Return numerator and denominator of each loss term as metrics `ledger/...`, sums over passes with a ledger."""
    found: dict[str, float] = {}
    for one in result.passes:
        for ledger in one.minibatch.ledgers:
            for name, value in ledger_metrics(ledger, one.totals).items():
                found[name] = found[name] + value if name in found and name.startswith("ledger/") else value
    return found
