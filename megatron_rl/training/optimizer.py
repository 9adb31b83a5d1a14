# SPDX-License-Identifier: Apache-2.0
"""megatron-core's optimizer (ZeRO-1 or replicated), its learning-rate schedule, and the optimizer step of a role.

The end of a step needs no host sync and can be captured in a CUDA graph. For an unsound step (non-finite loss or norm,
wrong token count) a device flag makes Adam leave weights and states unchanged; `OptimizerStep` then raises, after its
one host sync. Adam is torch's fused implementation, because it reads learning rate and flag from the device.

Forward and backward over the microbatches of a minibatch have three modes with bitwise equal results:

    eager    megatron-core's schedule on the tensors of the batch
    static   the same model on static buffers, one set per microbatch shape (`cuda_graph.py`)
    graph    the static step as one CUDA graph per shape

Values that change between steps (KL coefficient, learning rate) are persistent device tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.algorithms.losses import check_ledger, is_ledger_met, ledger_metrics
from megatron_rl.checkpoint.pieces import MOMENTS, list_state_shards
from megatron_rl.config.schema import TrainedConfig
from megatron_rl.models.stages import local_values
from megatron_rl.parallel.collectives import broadcast_tensors, share_object
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.packed_model import Head, HostMemory, PackedModel
from megatron_rl.types import UserError

_ADAM_FLAGS = ("foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad", "decoupled_weight_decay")
_SUMMED_ELEMENTS = 65536  # squares that are added up in float32 in sequence, on a CPU


class Optimizer:
    """Optimizer of a trained model and its learning-rate schedule; construction is collective.

    Args:
        total_steps: length of the schedule in optimizer steps.

    Attributes:
        adams: torch optimizers of dense and of expert parameters.
        kind: "adam" or "muon".
        offloads: whether `release` moves gradients or states.
        is_sound: 0-d device bool; `finish` changes weights only if it is true.
        has_gradients: whether the gradient buffers hold gradients of a step to come.
        steps: completed optimizer steps.
    """

    def __init__(self, model: PackedModel, config: TrainedConfig, total_steps: int) -> None:
        self._ddp: list[Any] = [*model.ddp]
        self._stages = model.stages
        self._collection, self._device = model.groups.collection, model.device
        self._offloads_gradients, self._offloads_states = config.offload_gradients, bool(config.offload_optimizer)
        self._streams = config.offload_optimizer == "stream"
        self.offloads = self._offloads_gradients or self._offloads_states
        self.megatron = _build_optimizer(model, config)
        self.scheduler = _build_scheduler(self.megatron, config, total_steps)
        self.steps, self.has_gradients = 0, False
        self._clip_grad = config.clip_grad
        self.is_sound = torch.ones((), dtype=torch.bool, device=self._device)
        self._found_inf = torch.zeros((), dtype=torch.float32, device=self._device)
        self._parts = _list_parts(self.megatron)
        self.adams = [part.optimizer for part in self._parts if not part.is_stub_optimizer]
        for adam in self.adams:
            adam.found_inf = self._found_inf
        self.kind = config.optimizer
        self._muon: Muon | None = None
        if self.kind == "muon":
            from megatron_rl.training.muon import Muon

            trained: Any = model.trained
            self._muon = Muon(trained, self._ddp, list_state_shards(model.stages, self.megatron))
        self._host_memory = HostMemory(self._device)
        self._buffers: list[Any] = [b for x in self._ddp for b in (*x.buffers, *x.expert_parallel_buffers)]
        if model.stream is not None and self.offloads:  # graphs capture addresses
            from megatron_rl.training.fixed_memory import FixedGradients, FixedStates

            self._host_memory = FixedStates(self._device)
            self._buffers = [FixedGradients(buffer) for buffer in self._buffers if self._offloads_gradients]
        self._is_released = False
        self._learning_rates = [
            torch.zeros((), dtype=torch.float32, device=self._device) for _ in self.megatron.param_groups
        ]

    def moments(self, main: torch.Tensor) -> tuple[str, ...]:
        """Return the names of the optimizer states of a parameter."""
        is_matrix = any(main in getattr(adam, "matrices", ()) for adam in self.adams)  # updated by Muon
        return MOMENTS[:1] if is_matrix else MOMENTS

    def count_step(self) -> None:
        """Count a step that has changed the weights."""
        self.steps += 1

    def resume(self, steps: int, schedule: Mapping[str, Any]) -> None:
        """Continue after `steps` optimizer steps, with the present config's learning rate at the saved position."""
        self.steps, self.has_gradients = steps, False
        self.scheduler.num_steps = schedule["num_steps"]
        self.scheduler.step(0)  # recomputes the learning rate by the present config

    def release(self) -> None:
        """Free the memory of used gradients and offload Adam's states, as configured, until `restore`."""
        if self._offloads_gradients and not self._ddp and not self.has_gradients:
            self.megatron.zero_grad()
        for buffer in self._buffers if self._offloads_gradients and not self.has_gradients else ():
            buffer.offload_to_cpu(move_params=False, move_grads=True)
        if self._offloads_states and not self._is_released:
            states = self._list_states()
            for state, copy in zip(states, self._host_memory.store(states), strict=True):
                state.data = copy
        parallel_state.get_global_memory_buffer().buffer.clear()  # gathered hidden states; recreated on demand
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._is_released = True

    def restore(self) -> None:
        """Undo `release`; does nothing if nothing is released."""
        if not self._is_released:
            return
        for buffer in self._buffers if self._offloads_gradients and not self.has_gradients else ():
            buffer.reload_from_cpu(move_params=False, move_grads=True)
        if self._offloads_states:
            states = self._list_states()
            for state, loaded in zip(states, self._host_memory.load(states), strict=True):
                state.data = loaded
        self._is_released = False

    def _list_states(self) -> list[torch.Tensor]:
        """List Adam's moments and the float32 master weights."""
        of_model = {local_values(p).untyped_storage().data_ptr() for p in self._stages.parameters()}
        groups = [group for adam in self.adams for group in adam.param_groups]
        weights = [p for group in groups for p in group["params"]]
        states = [x for adam in self.adams for state in adam.state.values() for x in state.values() if x.dim()]
        states = [] if self._streams else states
        return [p for p in weights if p.untyped_storage().data_ptr() not in of_model] + states

    def zero_grad(self) -> None:
        """Clear the gradient buffers for the gradients of the next step."""
        self.has_gradients = True
        for module in self._ddp:
            module.zero_grad_buffer()
        self.megatron.zero_grad()

    def advance_schedule(
        self,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        grad_clip_norm: float | None = None,
    ) -> float:
        """Advance the schedule, and return the learning rate of the next update; given settings are for it only."""
        # Before the update, so that step k of a W-step warm-up uses lr * k / W: the first step is not wasted on lr 0.
        # The schedule also applies the per-group weight decay multipliers.
        self.scheduler.step(increment=1)
        self.has_gradients, config = False, self.megatron.config
        self._clip_grad = config.clip_grad if grad_clip_norm is None else grad_clip_norm
        for tensor, group in zip(self._learning_rates, self.megatron.param_groups, strict=True):
            group["lr"] = group["lr"] if lr is None else lr
            group["betas"] = betas or (config.adam_beta1, config.adam_beta2)
            group["eps"] = config.adam_eps if eps is None else eps
            if weight_decay is not None:
                group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)
            tensor.fill_(group["lr"])
        return float(self.megatron.param_groups[0]["lr"])

    @torch.no_grad()
    def finish(self) -> torch.Tensor:
        """Reduce and clip gradients; update if `is_sound` and their norm is finite. No host sync; collective.

        Returns:
            Global gradient norm before clipping, 0-d float32.
        """
        if self._ddp:
            finalize_model_grads(self._ddp, None, pg_collection=self._collection)
        self.megatron.prepare_grads()
        norm = self._compute_norm()
        if self._clip_grad > 0:
            coefficient = (self._clip_grad / (norm + 1e-6)).clamp(max=1.0)
            for adam in self.adams:
                grads = [p.grad for group in adam.param_groups for p in group["params"] if p.grad is not None]
                if grads:
                    torch._foreach_mul_(grads, coefficient)  # pyright: ignore[reportPrivateImportUsage]  # one kernel
        self._found_inf.copy_(~(self.is_sound & norm.isfinite()))
        if self._muon:
            self._muon.update_gradients(self._found_inf)
        groups = self.megatron.param_groups
        numbers = [group["lr"] for group in groups]
        for group, tensor in zip(groups, self._learning_rates, strict=True):
            group["lr"] = tensor  # on the device, where a captured step reads the current rate
        try:
            self.megatron.step_with_ready_grads()
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number
        return norm

    def _compute_norm(self) -> torch.Tensor:
        by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
        for part in self._parts:
            # The method's name depends on the version of megatron-core.
            newer = getattr(part, "get_grads_for_grad_norm", None)
            grads = newer() if newer else part.get_main_grads_for_grad_norm()
            by_group.setdefault(part.get_grad_stats_parallel_group(), []).extend(grads)
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        for group, grads in by_group.items():
            square = sum_squares(grads) if grads else torch.zeros((), dtype=torch.float32, device=self._device)
            if group.size() > 1:
                dist.all_reduce(square, group=group)
            total = total + square
        return total.sqrt()


def sum_squares(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squares of all elements, 0-d float32."""
    if grads[0].device.type == "cpu":  # torch's norm of 28 million equal elements would be 0.2 % off there
        grads = [piece for grad in grads for piece in grad.reshape(-1).split(_SUMMED_ELEMENTS)]
    norms = torch._foreach_norm(list(grads))  # pyright: ignore[reportPrivateImportUsage]  # one kernel
    return torch.stack(norms).square().sum()


def _build_optimizer(model: PackedModel, role: TrainedConfig) -> MegatronOptimizer:
    config = OptimizerConfig(
        optimizer="adam",
        lr=role.lr,
        min_lr=role.min_lr,
        weight_decay=role.weight_decay,
        adam_beta1=role.adam_beta1,
        adam_beta2=role.adam_beta2,
        adam_eps=role.adam_eps,
        clip_grad=role.clip_grad,
        bf16=model.config.bf16,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=role.use_distributed_optimizer,
    )
    kind: type[torch.optim.AdamW] = torch.optim.AdamW
    if role.optimizer == "muon":
        from megatron_rl.training.muon import AdamAndMuon as kind
    elif role.offload_optimizer == "stream":
        from megatron_rl.training.streamed_adam import StreamedAdam as kind
    if model.is_fully_sharded:
        from megatron_rl.training.fully_sharded import ShardedAdam

        is_tied = model.shape.tied_embeddings and not model.shape.has_score_head
        return ShardedAdam(model.stages, model.groups, config, partial(_make_fused_adam, kind=kind), is_tied=is_tied)
    with _job_of(model.groups.world):
        optimizer = get_megatron_optimizer(
            config, [*model.ddp], use_gloo_process_groups=False, pg_collection=model.groups.collection
        )
    for part in _list_parts(optimizer):
        if not part.is_stub_optimizer:
            _use_fused_adam(part, kind, is_capturable=model.stream is not None)
    return optimizer


@contextmanager
def _job_of(group: dist.ProcessGroup) -> Iterator[None]:
    """Restrict megatron-core's job-wide gathers to the ranks of the role."""
    real = dist.get_world_size, dist.all_gather_object
    dist.get_world_size = lambda group=group: real[0](group)
    dist.all_gather_object = lambda found, value, group=group: real[1](found, value, group)
    try:
        yield
    finally:
        dist.get_world_size, dist.all_gather_object = real


def _build_scheduler(optimizer: MegatronOptimizer, role: TrainedConfig, total_steps: int) -> OptimizerParamScheduler:
    warmup = int(role.lr_warmup_steps if role.lr_warmup_steps >= 1 else role.lr_warmup_steps * total_steps)
    decay_steps = max(total_steps, warmup + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=role.lr,
        min_lr=min(role.min_lr, role.lr),
        lr_warmup_steps=warmup,
        lr_decay_steps=decay_steps,
        lr_decay_style=role.lr_decay_style,
        start_wd=role.weight_decay,
        end_wd=role.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
    )


def _list_parts(optimizer: MegatronOptimizer) -> list[Any]:
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _use_fused_adam(part: MegatronOptimizer, kind: type[torch.optim.AdamW], *, is_capturable: bool) -> None:
    part.optimizer = _make_fused_adam(part.optimizer.param_groups, kind, is_capturable=is_capturable)


def _make_fused_adam(
    groups: Sequence[Mapping[str, Any]], kind: type[torch.optim.AdamW], *, is_capturable: bool = False
) -> torch.optim.AdamW:
    # The constructor would reject the groups' parameter shards, so they are set afterwards.
    adam = kind([torch.zeros(1)], lr=0.0, fused=True, capturable=is_capturable)
    adam.param_groups = [
        {**adam.defaults, **{key: value for key, value in group.items() if key not in _ADAM_FLAGS}} for group in groups
    ]
    return adam


class StepLoss:
    """Loss of an optimizer step, called by the schedule with a microbatch and the head's outputs.

    Args:
        name: unique per role; part of the key of captured graphs.
        function: (settings, microbatch, *head outputs) -> scalar loss and metrics by name: sums, or maxima if the name
            begins with "max/"; the same names for every microbatch.
    """

    def __init__(
        self, name: str, function: Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]], device: torch.device
    ) -> None:
        self.name, self._function = name, function
        self.settings: Any = None  # Python numbers from the config; changing them invalidates captured graphs
        self.metric_names: tuple[str, ...] = ()  # sums first; empty before the first call
        self._are_names_shared = False
        # 0-d device bool: a head output received a nonzero gradient.
        self.is_pulled = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, microbatch: TrainBatch, *found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scalar loss and its metrics packed in one float64 tensor [num_metrics]."""
        for values in found:
            if values.requires_grad:
                values.register_hook(self._note_gradient)
        loss, metrics = self._function(self.settings, microbatch, *found)
        sums = [name for name in metrics if not name.startswith("max/")]
        names = (*sums, *(name for name in metrics if name.startswith("max/")))
        if self.metric_names not in ((), names):
            differing = ", ".join(sorted({*names} ^ {*self.metric_names})) or "its metrics in another order"
            raise UserError(
                f"in some microbatches only, the {self.name} loss reports {differing}",
                source="algorithm.policy_loss",
                expected="the same metrics in each microbatch",
                hint="report a tensor of zeros for a metric without a value",
            )
        self.metric_names = names
        return loss, torch.stack([metrics[name].detach().double() for name in names])

    @property
    def num_sums(self) -> int:
        """Number of metrics that are sums."""
        return sum(not name.startswith("max/") for name in self.metric_names)

    def share_names(self, group: dist.ProcessGroup, source: int) -> None:
        """Broadcast the metric names from the last pipeline stage, unless done since the last `set_settings`."""
        if not self._are_names_shared:
            self.metric_names = share_object(self.metric_names, group, source)
            self._are_names_shared = True

    def set_settings(self, settings: Any) -> None:
        """Set the settings of the following steps."""
        if settings != self.settings:
            self.settings, self.metric_names, self._are_names_shared = settings, (), False

    def _note_gradient(self, gradient: torch.Tensor) -> None:
        self.is_pulled.logical_or_(gradient.any())  # on the device: part of a captured step


class EagerStep:
    """Optimizer step by megatron-core's schedule on the batch's own tensors."""

    def __init__(self, model: PackedModel, head: Head, optimizer: Optimizer) -> None:
        self.model, self.optimizer, self._head = model, optimizer, head

    def prepare(self, minibatch: TrainBatch, loss: StepLoss, *, adds: bool) -> None:
        """Prepare a pass, before gradients are cleared, or kept if it `adds` to them: captures overwrite them."""

    def run(self, minibatch: TrainBatch, loss: StepLoss) -> list[torch.Tensor]:
        """Run forward and backward; return packed metrics per microbatch, empty before the last stage."""
        return self.model.run_microbatches(minibatch.microbatches(), self._head, loss)

    def finish(self) -> torch.Tensor:
        """Update the weights and return the gradient norm; see `Optimizer.finish`."""
        return self.optimizer.finish()


@dataclass(frozen=True)
class Pass:
    """Gradients of one minibatch, not yet applied; `totals`: of `loss.metric_names`, equal on every rank."""

    minibatch: TrainBatch
    loss: StepLoss
    rows: list[torch.Tensor]
    totals: dict[str, Any]


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step, equal on every rank except for the minibatches."""

    passes: list[Pass]  # minibatches whose gradients were added, with their totals
    totals: dict[str, float]  # metrics over passes, microbatches and DP ranks: sums, or maxima for "max/..."
    grad_norm: float  # global gradient norm before clipping
    lr: float
    loss: StepLoss  # of the last pass
    adapter_norm: float | None = None  # norm of the adapters after the step; `None` without adapters


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
