# SPDX-License-Identifier: Apache-2.0
"""megatron-core's optimizer (ZeRO-1 or replicated) and its learning-rate schedule.

The end of an optimizer step (reduce gradients, norm, clip, Adam, gather weights) looks at no number on the host:
`finish` is the same function in every step mode, and a CUDA graph can hold it. Where the step is not sound (a loss or a
norm that is not finite, a wrong count) Adam is told so on the device and leaves weights and states as they are;
the caller reads the numbers afterwards and raises. Adam is torch's fused one, on CPU and GPU: it takes the learning
rate and that flag from the device, and needs neither apex nor Transformer Engine. Muon takes the matrices of the layers
where the config says so (`muon.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.checkpoint.optimizer_states import list_state_shards
from megatron_rl.checkpoint.pieces import MOMENTS
from megatron_rl.config.schema import TrainedConfig
from megatron_rl.models.stages import local_values
from megatron_rl.parallel.groups import free_gather_buffers
from megatron_rl.training.host_memory import HostMemory
from megatron_rl.training.packed_model import PackedModel

_ADAM_FLAGS = ("foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad", "decoupled_weight_decay")


class Optimizer:
    """The optimizer of a model that is trained, and its learning-rate schedule; building it is collective.

    Args:
        model: with `spec.trainable`.
        config: the section of its role.
        total_steps: length of the learning-rate schedule, in optimizer steps.

    Attributes:
        megatron: megatron-core's optimizer.
        scheduler: of its learning rate.
        adams: torch's optimizers of this rank: of dense parameters, and of experts.
        kind: "adam" or "muon".
        is_sound: 0-d bool on the device, read by `finish`: whether the weights may be changed.
        steps: how many have changed the weights.
    """

    def __init__(self, model: PackedModel, config: TrainedConfig, total_steps: int) -> None:
        self._ddp: list[Any] = [*model.ddp]
        self._stages = model.stages
        self._collection, self._device = model.groups.collection, model.device
        self._offloads_gradients, self._offloads_states = config.offload_gradients, config.offload_optimizer
        self.megatron = _build_optimizer(model, config)
        self.scheduler = _build_scheduler(self.megatron, config, total_steps)
        self.steps = 0
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
        self._is_released = False
        self._learning_rates = [
            torch.zeros((), dtype=torch.float32, device=self._device) for _ in self.megatron.param_groups
        ]

    def moments(self, main: torch.Tensor) -> tuple[str, ...]:
        """Names of the states of a parameter that it updates."""
        is_matrix = any(main in getattr(adam, "matrices", ()) for adam in self.adams)  # those of Muon
        return MOMENTS[:1] if is_matrix else MOMENTS

    def count_step(self) -> None:
        """Say that a step has changed the weights."""
        self.steps += 1

    def resume(self, steps: int, schedule: Mapping[str, Any]) -> None:
        """Continue after `steps` steps from a saved schedule, whose shape may have differed."""
        self.steps = steps
        self.scheduler.num_steps = schedule["num_steps"]
        self.scheduler.step(0)  # the learning rate of this step; its shape is that of the present config

    def release(self) -> None:
        """Give back what generation does not need, as configured; gradients are lost, states go to the host."""
        if self._offloads_gradients:
            if not self._ddp:
                self.megatron.zero_grad()
            for module in self._ddp:
                for buffer in (*module.buffers, *module.expert_parallel_buffers):
                    buffer.offload_to_cpu(move_params=False, move_grads=True)
        if self._offloads_states and not self._is_released:
            states = self._list_states()
            for state, copy in zip(states, self._host_memory.store(states), strict=True):
                state.data = copy
        free_gather_buffers()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._is_released = True

    def restore(self) -> None:
        """Take it back before an update; does nothing if nothing was released."""
        if not self._is_released:
            return
        if self._offloads_gradients:
            for module in self._ddp:
                for buffer in (*module.buffers, *module.expert_parallel_buffers):
                    buffer.reload_from_cpu(move_params=False, move_grads=True)
        if self._offloads_states:
            states = self._list_states()
            for state, loaded in zip(states, self._host_memory.load(states), strict=True):
                state.data = loaded
        self._is_released = False

    def _list_states(self) -> list[torch.Tensor]:
        """Adam's moments, and the float32 weights where they are not the model's own."""
        of_model = {local_values(p).untyped_storage().data_ptr() for p in self._stages.parameters()}
        groups = [group for adam in self.adams for group in adam.param_groups]
        weights = [p for group in groups for p in group["params"]]
        states = [x for adam in self.adams for state in adam.state.values() for x in state.values() if x.dim()]
        return [p for p in weights if p.untyped_storage().data_ptr() not in of_model] + states

    def zero_grad(self) -> None:
        """Clear the gradient buffers."""
        for module in self._ddp:
            module.zero_grad_buffer()
        self.megatron.zero_grad()

    def advance_schedule(self) -> float:
        """The learning rate of the next update, which `finish` will read from the device."""
        # Before the update, so that step k of a W-step warm-up uses lr * k / W (the first is not lost on lr 0).
        # The schedule also applies the per-group weight decay multipliers.
        self.scheduler.step(increment=1)
        for tensor, group in zip(self._learning_rates, self.megatron.param_groups, strict=True):
            tensor.fill_(group["lr"])
        return float(self.megatron.param_groups[0]["lr"])

    @torch.no_grad()
    def finish(self) -> torch.Tensor:
        """Reduce, clip and update where `is_sound` and the norm is finite; no host sync, collective over the role.

        Gradients are summed over microbatches and DP; the loss weights hold the denominator.

        Returns:
            The global gradient norm before clipping, 0-d float32.
        """
        if self._ddp:
            finalize_model_grads(self._ddp, None, pg_collection=self._collection)
        self.megatron.prepare_grads()
        norm = self._compute_norm()
        limit = self.megatron.config.clip_grad
        if limit > 0:
            coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
            for adam in self.adams:
                grads = [p.grad for group in adam.param_groups for p in group["params"] if p.grad is not None]
                if grads:
                    torch._foreach_mul_(grads, coefficient)  # pyright: ignore[reportPrivateImportUsage]  # one kernel
        self._found_inf.copy_(~(self.is_sound & norm.isfinite()))
        if self._muon:
            self._muon.update_gradients(self._found_inf)
        with self._learning_rates_on_device():
            self.megatron.step_with_ready_grads()
        return norm

    def _compute_norm(self) -> torch.Tensor:
        """Of all parameters of the role, each counted once."""
        by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
        for part in self._parts:
            by_group.setdefault(part.get_grad_stats_parallel_group(), []).extend(_list_grads_of_norm(part))
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        for group, grads in by_group.items():
            square = torch.zeros((), dtype=torch.float32, device=self._device)
            if grads:
                norms = torch._foreach_norm(grads)  # pyright: ignore[reportPrivateImportUsage]  # one kernel
                square = torch.stack(norms).square().sum()
            if group.size() > 1:
                dist.all_reduce(square, group=group)
            total = total + square
        return total.sqrt()

    @contextmanager
    def _learning_rates_on_device(self) -> Iterator[None]:
        """Groups hold tensors in the block, and numbers outside of it (for the schedule and for checkpoints)."""
        groups = self.megatron.param_groups
        numbers = [group["lr"] for group in groups]
        for group, tensor in zip(groups, self._learning_rates, strict=True):
            group["lr"] = tensor
        try:
            yield
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number


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
    if model.is_fully_sharded:
        from megatron_rl.training.fully_sharded import ShardedAdam

        is_tied = model.shape.tied_embeddings and not model.shape.has_score_head
        return ShardedAdam(model.stages, model.groups, config, _make_fused_adam, is_tied=is_tied)
    with _job_of(model.groups.world):
        optimizer = get_megatron_optimizer(
            config, [*model.ddp], use_gloo_process_groups=False, pg_collection=model.groups.collection
        )
    kind = torch.optim.AdamW
    if role.optimizer == "muon":
        from megatron_rl.training.muon import AdamAndMuon as kind
    for part in _list_parts(optimizer):
        if not part.is_stub_optimizer:
            _use_fused_adam(part, kind, is_capturable=model.stream is not None)
    return optimizer


@contextmanager
def _job_of(group: dist.ProcessGroup) -> Iterator[None]:
    """megatron-core asks all ranks of the job for their parameter groups, and means the role's ranks."""
    real = dist.get_world_size, dist.all_gather_object
    dist.get_world_size = lambda group=group: real[0](group)
    dist.all_gather_object = lambda found, value, group=group: real[1](found, value, group)
    try:
        yield
    finally:
        dist.get_world_size, dist.all_gather_object = real


def _build_scheduler(optimizer: MegatronOptimizer, role: TrainedConfig, total_steps: int) -> OptimizerParamScheduler:
    decay_steps = max(total_steps, role.lr_warmup_steps + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=role.lr,
        min_lr=min(role.min_lr, role.lr),
        lr_warmup_steps=role.lr_warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=role.lr_decay_style,
        start_wd=role.weight_decay,
        end_wd=role.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
    )


def _list_parts(optimizer: MegatronOptimizer) -> list[Any]:
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _list_grads_of_norm(part: Any) -> list[torch.Tensor]:
    """Gradients that count for the norm, by either of megatron-core's names of the question."""
    if hasattr(part, "get_grads_for_grad_norm"):
        return part.get_grads_for_grad_norm()
    return part.get_main_grads_for_grad_norm()


def _use_fused_adam(part: MegatronOptimizer, kind: type[torch.optim.AdamW], *, is_capturable: bool) -> None:
    """Put torch's fused AdamW in the place of the one that megatron-core chose (apex's, TE's or torch's)."""
    part.optimizer = _make_fused_adam(part.optimizer.param_groups, kind, is_capturable=is_capturable)


def _make_fused_adam(
    groups: Sequence[Mapping[str, Any]],
    kind: type[torch.optim.AdamW] = torch.optim.AdamW,
    *,
    is_capturable: bool = False,
) -> torch.optim.AdamW:
    # The groups hold shards of parameters, which the constructor would refuse: they are put in afterwards.
    adam = kind([torch.zeros(1)], lr=0.0, fused=True, capturable=is_capturable)
    adam.param_groups = [
        {**adam.defaults, **{key: value for key, value in group.items() if key not in _ADAM_FLAGS}} for group in groups
    ]
    return adam
