# SPDX-License-Identifier: Apache-2.0
"""One optimizer step over a minibatch, shared by all trained roles, with a single host sync."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.algorithms.aggregation import check_ledger, is_ledger_met, ledger_metrics
from megatron_rl.config.schema import TrainedConfig
from megatron_rl.parallel.collectives import broadcast_tensors, gather_objects
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.optimizer import EagerStep, Optimizer, StepLoss
from megatron_rl.training.packed_model import Head, PackedModel
from megatron_rl.types import UserError

_GROWTH = (
    "lower {role}.lr or {role}.clip_grad, and look at the last lines of metrics.jsonl for a growing loss, "
    "gradient norm, KL or mismatch; model.dtype=float32 tells an overflow from a wrong number"
)
# Inputs of a loss in the order of their computation -> advice if one is not finite.
_INPUTS = {
    "rollout_logprobs": "the engine's log-probs: set hybrid.verify=full to rule out its weights",
    "old_logprobs": _GROWTH,
    "ref_logprobs": "the reference's log-probs: check reference.path",
    "values": "the critic's values: lower critic.lr or critic.clip_grad",
    "importance_weights": "the gap between engine and trainer: look at mismatch/max in metrics.jsonl",
    "returns": "look at the rewards, and at the critic's values",
    "advantages": "look at the rewards in rollouts/, and at algorithm.adv_estimator where it is your own",
    "update_logprobs": _GROWTH,  # recorded during this step, if at all
}
_MOST_NAMED = 8


def explain_unsound(
    message: str, role: str, minibatch: TrainBatch, losses: list[float], groups: ParallelGroups
) -> UserError:
    """Build the error that names role, microbatches and sequences; collective over the role."""
    found, bad = {}, []
    if groups.is_last_stage and groups.at.tp == groups.at.cp == 0:  # one rank per replica
        mask = minibatch.loss_mask
        inputs = {name: values for name in _INPUTS if (values := getattr(minibatch, name)) is not None}
        bad_ids = {name: minibatch.sequence_ids[mask & ~values.isfinite()] for name, values in inputs.items()}
        found = {name: ids.unique().tolist() for name, ids in bad_ids.items() if len(ids)}
        bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
    shares = gather_objects((found, bad, groups.at.dp), groups.world)
    name = next((name for name in _INPUTS if any(name in inputs for inputs, _, _ in shares)), None)
    where = [f"microbatches {', '.join(map(str, indices))} of DP rank {dp}" for _, indices, dp in shares if indices]
    if name is not None:
        ids = sorted({index for inputs, _, _ in shares for index in inputs.get(name, [])})
        said = "; ".join(minibatch.name_sequence(index) for index in ids[:_MOST_NAMED])
        where.append(f"{name} of {len(ids)} responses are not finite: {said}{' ...' if len(ids) > _MOST_NAMED else ''}")
    advice = _INPUTS.get(name or "") or _GROWTH
    return UserError(
        message,
        source=", ".join([role, *where]),
        expected="a finite loss and a finite gradient norm",
        hint=advice.format(role=role),
    )


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
class StepResult:
    """Result of an optimizer step, equal on every rank except for `minibatch`.

    Attributes:
        totals: metrics over microbatches and DP ranks: sums, or maxima for "max/...".
        grad_norm: global gradient norm before clipping.
        adapter_norm: norm of the adapters after the step; `None` without adapters.
    """

    totals: dict[str, float]
    grad_norm: float
    lr: float
    loss: StepLoss
    minibatch: TrainBatch
    adapter_norm: float | None = None


class OptimizerStep:
    """Optimizer step of a role in two halves, each collective over the role."""

    def __init__(self, step: EagerStep, role: str) -> None:
        self._step, self._role = step, role
        self._pending: tuple[TrainBatch, StepLoss, list[torch.Tensor], torch.Tensor] | None = None

    def forward_backward(self, minibatch: TrainBatch, loss: StepLoss) -> None:
        """Accumulate the gradients of a loss over a minibatch.

        Raises:
            UserError: a second call before `optim_step`; on every rank.
        """
        if self._pending is not None:
            raise UserError(
                "a second forward_backward before optim_step",
                source=f"{self._role}.forward_backward()",
                expected="optim_step() after each forward_backward(minibatch, loss)",
                hint="gradients are not summed over minibatches: raise actor.ppo_mini_batch_size",
            )
        step, optimizer = self._step, self._step.optimizer
        optimizer.restore()
        step.prepare(minibatch, loss)
        loss.is_pulled.zero_()
        if step.model.routing is not None:
            step.model.routing.clear()
        optimizer.zero_grad()
        rows = step.run(minibatch, loss)
        totals = _reduce(rows, loss, step.model.groups, minibatch.tokens.device)
        self._pending = minibatch, loss, rows, totals

    def optim_step(self) -> StepResult:
        """Update the weights with the accumulated gradients.

        Raises:
            LedgerError: the loss did not count the minibatch's tokens or weights; on every rank.
            UserError: no gradients since the last call, a non-finite loss or gradient norm (the weights are kept), or a
                norm of 0 although the loss has a gradient; on every rank.
        """
        if self._pending is None:
            raise UserError(
                "an optimizer step without gradients",
                source=f"{self._role}.optim_step()",
                expected="forward_backward(minibatch, loss) before each optim_step()",
                hint="gradients are used once; pass all sequences of an optimizer step as one minibatch",
            )
        (minibatch, loss, rows, totals), self._pending = self._pending, None
        optimizer, groups = self._step.optimizer, self._step.model.groups
        found = dict(zip(loss.metric_names, totals.unbind(), strict=True))
        is_sound = found["loss"].isfinite()
        for ledger in minibatch.ledgers:
            is_sound = is_sound & is_ledger_met(ledger, found["tokens"], found["weights"])
        optimizer.is_sound.copy_(is_sound)
        lr = optimizer.advance_schedule()
        grad_norm = self._step.finish()
        adapters: Any = self._step.model.trained
        moved = [] if self._step.model.adapters is None else [adapters.measure_norm()[None]]
        read = torch.cat([totals, grad_norm.double()[None], *moved]).tolist()  # the only host sync
        values, norm, moved = read[: len(totals)], read[len(totals)], read[len(totals) + 1 :]
        found = dict(zip(loss.metric_names, values, strict=True))
        for ledger in minibatch.ledgers:
            check_ledger(ledger, found["tokens"], found["weights"])
        for quantity, value in (("loss", found["loss"]), ("gradient norm", norm)):
            if not math.isfinite(value):
                message = (
                    f"the {quantity} of optimizer step {optimizer.steps + 1} is {value} (the weights are as before)"
                )
                losses = [float(row[loss.metric_names.index("loss")]) for row in rows]
                raise explain_unsound(message, self._role, minibatch, losses, groups)
        if norm == 0:
            is_pulled = loss.is_pulled.int()
            dist.all_reduce(is_pulled, op=dist.ReduceOp.MAX, group=groups.world)
            if is_pulled:
                raise UserError(
                    f"the gradient norm of optimizer step {optimizer.steps + 1} is exactly 0, and the gradient of the "
                    "loss is not",
                    source=f"{self._role}, the backward pass",
                    expected="a gradient in the parameters that are trained",
                    hint=f"a frozen embedding under {self._role}.recompute_granularity=full cuts the backward pass off "
                    "(set none); parameters without their tensor_model_parallel mark are left out of the norm; a "
                    "policy that gives every token of the minibatch a probability of 1 has nothing left to learn",
                )
        optimizer.count_step()
        return StepResult(found, norm, lr, loss, minibatch, *moved)


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
    """Return numerator and denominator of each loss term as metrics `ledger/...`; empty if `minibatch.ledgers` is."""
    return {
        name: value
        for ledger in result.minibatch.ledgers
        for name, value in ledger_metrics(ledger, result.totals).items()
    }
