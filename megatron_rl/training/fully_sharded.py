# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 (1910.02054) with torch's FSDP2: data and context parallel ranks shard the rows of every parameter.

Embedding, last norm and output layer stay gathered until the pass ends. Expert-parallel experts are gathered from their
replicas only. Gradients are reduced in every microbatch's backward. With the layout's `shard_size`, the shards of a
group of ranks are replicated in other groups (hybrid sharding, 2304.11277), and gradients summed over the replicas once
per update. Parameters without gradients (router biases, a few float32 values) are replicated. A trained bfloat16 model
has float32 shards, cast to bfloat16 for the gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron_rl.models.stages import local_values
from megatron_rl.parallel.collectives import current_device
from megatron_rl.parallel.groups import ParallelGroups


def build_sharded(
    build: Callable[[], torch.nn.ModuleList], groups: ParallelGroups, dtype: torch.dtype, *, is_trained: bool
) -> torch.nn.ModuleList:
    """Build this rank's stages with sharded, uninitialized parameters; collective over the role.

    Args:
        is_trained: keep shards in float32 and sum their gradients.
    """
    with _without_storage():
        stages = build()
    assert not [*stages.buffers()], "what is no parameter has values that nobody reads"
    untrained = [
        (module, name, p)
        for module in stages.modules()
        for name, p in module.named_parameters(recurse=False)
        if not p.requires_grad
    ]
    for module, name, _ in untrained:
        delattr(module, name)  # hidden from FSDP
    for p in stages.parameters() if is_trained else ():
        p.data = p.data.float()
    stages.requires_grad_(is_trained)
    device = current_device()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    of_shards = groups.collection.intra_dp_cp, groups.collection.intra_expt_dp
    mesh, experts = (DeviceMesh.from_group(group, device.type) for group in of_shards)
    attributes = {name: dict(vars(p)) for name, p in stages.named_parameters()}
    for stage in cast(Iterable[Any], stages):
        for layer in stage.decoder.layers:
            if groups.layout.has_expert_replicas and hasattr(layer.mlp, "experts"):
                fully_shard(layer.mlp.experts, mesh=experts, mp_policy=policy, shard_placement_fn=_cut_matrices)
            fully_shard(layer, mesh=mesh, mp_policy=policy, shard_placement_fn=_cut_matrices)
        fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # the head needs the weights
    stages.to_empty(device=device)
    for name, p in stages.named_parameters():
        _note(p, attributes[name])
    for module, name, p in untrained:
        module.register_parameter(name, p)
    for module in _list_units(stages):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return stages


def _cut_matrices(param: torch.nn.Parameter) -> Shard | None:
    """Return the dimension that FSDP splits: rows m of experts [e, m, n]; `None`, the default, for other parameters."""
    return Shard(1) if param.ndim == 3 else None


@contextmanager
def _without_storage() -> Iterator[None]:
    """Move trained parameters to the meta device at registration, one at a time."""

    def forget(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> Any:  # annotated as None
        if param is None or not param.requires_grad:
            return None
        found = torch.nn.Parameter(param.data.to("meta"))
        _note(found, vars(param))
        return found

    hook = register_module_parameter_registration_hook(forget)
    try:
        yield
    finally:
        hook.remove()


def _note(param: torch.nn.Parameter, attributes: dict[str, Any]) -> None:
    """Copy megatron-core's attributes to a replacement parameter."""
    vars(param).update(attributes | vars(param))


def _list_units(stages: torch.nn.ModuleList) -> list[FSDPModule]:
    return [module for module in stages.modules() if isinstance(module, FSDPModule)]


def reshard(stages: torch.nn.ModuleList) -> None:
    """Free all gathered parameters."""
    for module in _list_units(stages):
        module.reshard()


class ShardedAdam(FP32Optimizer):
    """megatron-core's float32 optimizer for parameter shards.

    Args:
        make_adam: (parameter groups) -> torch optimizer.
        is_tied: whether embedding and output layer share weights.
    """

    def __init__(
        self,
        stages: torch.nn.ModuleList,
        groups: ParallelGroups,
        config: OptimizerConfig,
        make_adam: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        is_tied: bool,
    ) -> None:
        self._groups, self._has_copies = groups, is_tied and groups.layout.pp_size > 1
        self._sequence_parallel = cast(Any, stages[0]).config.sequence_parallel
        self._has_head_norms = cast(Any, stages[0]).config.qk_layernorm  # MLA's latent norms have the same names
        self._shards: list[tuple[str, torch.nn.Parameter, torch.nn.Parameter]] = []
        for name, p in stages.named_parameters():
            if p.requires_grad:
                shard = torch.nn.Parameter(local_values(p))
                _note(shard, vars(p))
                replicas = groups.replicas[".experts." in name]
                if replicas is not None and replicas.rank():
                    vars(shard)["shared"] = True  # the norm counts the first replica only
                vars(p)["main_param"] = shard
                self._shards.append((name, p, shard))
        matrices, vectors = ([shard for *_, shard in self._shards if (shard.ndim > 1) == n] for n in (True, False))
        betas = config.adam_beta1, config.adam_beta2
        shared = dict(betas=betas, eps=config.adam_eps, max_lr=config.lr, min_lr=config.min_lr, lr_mult=1.0)
        adam = make_adam([dict(params=matrices, wd_mult=1.0, **shared), dict(params=vectors, wd_mult=0.0, **shared)])
        super().__init__(adam, config, lambda optimizer, config: None)  # states are allocated in the first step
        self.tp_group, self.grad_stats_parallel_group = groups.tp, groups.world

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients."""
        for _, p, shard in self._shards:
            p.grad = shard.grad = None

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Complete the shards' gradients for Adam and return False (no infinities found); collective over the role."""
        parts: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        for name, p, shard in self._shards:
            shard.grad = torch.zeros_like(shard) if p.grad is None else local_values(p.grad)
            if self._groups.layout.shard_size and shard.numel():
                dist.all_reduce(shard.grad, group=self._groups.replicas[".experts." in name])
            is_norm_of_heads = self._has_head_norms and ("q_layernorm" in name or "k_layernorm" in name)
            if is_norm_of_heads or (self._sequence_parallel and getattr(p, "sequence_parallel", False)):
                parts.append(shard.grad)
            if getattr(p, "shared_embedding", False):
                copies.append(shard.grad)
        if self._groups.layout.tp_size > 1:
            _sum(parts, self._groups.tp)
        if self._has_copies and self._groups.collection.embd is not None:
            _sum(copies, self._groups.collection.embd)
        return False


def _sum(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce tensors in place, in one flat message."""
    found = [x for x in tensors if x.numel()]
    if found:
        flat = torch.cat([x.flatten() for x in found])
        dist.all_reduce(flat, group=group)
        for x, values in zip(found, flat.split([x.numel() for x in found]), strict=True):
            x.copy_(values.view(x.shape))
