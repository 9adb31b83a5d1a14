# SPDX-License-Identifier: Apache-2.0
"""megatron-core's optimizer (ZeRO-1 or replicated), its learning-rate schedule, and DDP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from megatron_rl.config.schema import TrainableConfig
from megatron_rl.parallel.groups import ParallelGroups


@dataclass
class TrainableModel:
    """DDP-wrapped model chunks with their optimizer and schedule."""

    modules: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    offload_gradients: bool = False
    offload_optimizer: bool = False
    is_released: bool = False

    def release(self) -> None:
        """Give back what generation does not need, as configured; gradients are lost, states go to the host."""
        if self.offload_gradients:
            for module in self.modules:
                for buffer in (*module.buffers, *module.expert_parallel_buffers):
                    buffer.offload_to_cpu(move_params=False, move_grads=True)
        if self.offload_optimizer:
            self.optimizer.offload_to_cpu()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.is_released = True

    def restore(self) -> None:
        """Take it back before an update; does nothing if nothing was released."""
        if not self.is_released:
            return
        if self.offload_gradients:
            for module in self.modules:
                for buffer in (*module.buffers, *module.expert_parallel_buffers):
                    buffer.reload_from_cpu(move_params=False, move_grads=True)
        if self.offload_optimizer:
            self.optimizer.restore_from_cpu()
        self.is_released = False

    def zero_grad(self) -> None:
        """Clear the gradient buffers."""
        for module in self.modules:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> tuple[float, float]:
        """Advance the schedule, clip, update; returns (global gradient norm, learning rate).

        Raises:
            FloatingPointError: the gradient norm is not finite (the same on every rank).
        """
        # Before the update, so that step k of a W-step warm-up uses lr * k / W (the first is not lost on lr 0).
        # The schedule also applies the per-group weight decay multipliers.
        self.scheduler.step(increment=1)
        succeeded, grad_norm, _ = self.optimizer.step()
        grad_norm = float(grad_norm if grad_norm is not None else 0.0)
        if not succeeded or not torch.isfinite(torch.tensor(grad_norm)):
            raise FloatingPointError(
                f"gradient norm is {grad_norm}: the weights of this process are no longer usable; "
                "lower the learning rate, or look at the last lines of metrics.jsonl for a growing mismatch or loss")
        return grad_norm, float(self.optimizer.param_groups[0]["lr"])


def build_trainable(
    stages: torch.nn.ModuleList, config: TransformerConfig, groups: ParallelGroups, role: TrainableConfig,
    *, total_optimizer_steps: int,
) -> TrainableModel:
    """Wrap model chunks in DDP and build their optimizer; collective over the role.

    Gradients are summed (not averaged) over microbatches and DP, in float32; see `transformer_config`.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=role.use_distributed_optimizer)
    modules = [
        DistributedDataParallel(config, ddp_config, stage, disable_bucketing=index > 0,
                                pg_collection=groups.collection)
        for index, stage in enumerate(stages)
    ]
    config.finalize_model_grads_func = _finalize_summed_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=role.lr, min_lr=role.min_lr, weight_decay=role.weight_decay,
            adam_beta1=role.adam_beta1, adam_beta2=role.adam_beta2, adam_eps=role.adam_eps,
            clip_grad=role.clip_grad, bf16=config.bf16, params_dtype=config.params_dtype,
            use_distributed_optimizer=role.use_distributed_optimizer),
        modules, use_gloo_process_groups=False, pg_collection=groups.collection)
    config.grad_scale_func = optimizer.scale_loss
    decay_steps = max(total_optimizer_steps, role.lr_warmup_steps + 1)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=role.lr, min_lr=min(role.min_lr, role.lr),
        lr_warmup_steps=role.lr_warmup_steps, lr_decay_steps=decay_steps, lr_decay_style=role.lr_decay_style,
        start_wd=role.weight_decay, end_wd=role.weight_decay, wd_incr_steps=decay_steps,
        wd_incr_style="constant")
    return TrainableModel(
        modules, optimizer, scheduler, offload_gradients=role.offload_gradients,
        offload_optimizer=role.offload_optimizer)


def _finalize_summed_grads(model: list[torch.nn.Module], num_tokens: object = None, **kwargs: object) -> None:
    """Reduce gradients without dividing by a token count: the loss weights hold the denominator."""
    finalize_model_grads(model, None, **kwargs)
