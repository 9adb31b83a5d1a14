# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices of the layers, AdamW for all other parameters (embedding, output layer, heads, norms, biases).

Muon (K. Jordan, 2024, kellerjordan.github.io/posts/muon) updates a matrix by its orthogonalized momentum. Its unit is
the logical tensor of the checkpoint (q, k, v, gate, up and each expert), so an update does not depend on the layout.
Updates are scaled to the RMS of AdamW's (arXiv 2502.16982, equation 4), so that both share a learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.checkpoint.pieces import MOMENTS, StateShard
from megatron_rl.parallel.collectives import gather_rows
from megatron_rl.weights.families import is_layer_matrix
from megatron_rl.weights.packed_experts import find_fused
from megatron_rl.weights.shard_box import ShardBox, box_shape, box_slices

MOMENTUM = 0.95  # Nesterov momentum
_COEFFICIENTS, _ITERATIONS, _EPSILON = (3.4445, -4.7750, 2.0315), 5, 1e-7
_RMS_OF_ADAM = 0.2


class AdamAndMuon(torch.optim.AdamW):
    """Fused AdamW; gradients of `matrices` hold Muon's updates, applied with learning rate and weight decay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.matrices: set[torch.Tensor] = set()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Apply Muon's updates and one AdamW step."""
        updates = {p: p.grad for group in self.param_groups for p in group["params"] if p in self.matrices}
        found_inf = vars(self)["found_inf"]  # 0-d; 1 skips the update, also in torch's kernels
        for group in self.param_groups:
            for p in group["params"]:
                update = updates.get(p)
                if update is not None:
                    moved = p * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * update
                    p.copy_(torch.where(found_inf > 0, p, moved))
                    p.grad = None  # AdamW skips it
        loss = super().step(closure)
        for p, update in updates.items():
            p.grad = update
        return loss


class Muon:
    """Conversion of matrix gradients into Muon updates before a step of `AdamAndMuon`.

    Args:
        model: a `PackedModel`.
        ddp: wrappers of the stages, which own the gradient buffers.
    """

    def __init__(self, model: Any, ddp: Sequence[Any], shards: Iterable[StateShard]) -> None:
        self._tp, self._shapes = model.groups.tp, model.shape.logical_tensors()
        params = dict(model.stages.named_parameters())
        tables = [_group_by_param(model.placements(rank)) for rank in dist.get_process_group_ranks(self._tp)]
        is_matrix = {
            name: all(is_layer_matrix(box.hf_name, self._shapes[box.hf_name]) for box in boxes)
            for name, boxes in tables[self._tp.rank()].items()
        }
        # Of each matrix: the elements that this rank updates, the parameter, and boxes per tensor parallel rank.
        self._matrices: list[tuple[StateShard, Any, list[list[ShardBox]]]] = [
            (shard, params[shard.param], [table[shard.param] for table in tables])
            for shard in shards
            if is_matrix[shard.param]
        ]
        for shard, _, _ in self._matrices:
            assert isinstance(shard.optimizer, AdamAndMuon)
            shard.optimizer.matrices.add(shard.main)
        # ZeRO-1: buckets that contain a matrix, with the group that shards each.
        moved = {params[name] for name in params if is_matrix.get(name)}
        self._buckets = [
            (bucket.grad_data, group.intra_distributed_optimizer_instance_group)
            for module in ddp
            for group in (*module.bucket_groups, *module.expert_parallel_bucket_groups)
            if group.ddp_config.use_distributed_optimizer
            for bucket in group.buckets
            if not moved.isdisjoint(bucket.params)
        ]

    @torch.no_grad()
    def update_gradients(self, found_inf: torch.Tensor) -> None:
        """Replace reduced and clipped gradients by updates for a learning rate of 1; collective.

        Args:
            found_inf: 0-d; a positive value keeps the momentum unchanged.
        """
        for shard, _, _ in self._matrices:
            state, gradient = shard.optimizer.state[shard.main], shard.main.grad
            assert gradient is not None
            old = state.setdefault(MOMENTS[0], torch.zeros_like(gradient))
            new = old.lerp(gradient, 1 - MOMENTUM)
            # `gradient` is a view of the buffer
            gradient.lerp_(new, MOMENTUM)
            old.copy_(torch.where(found_inf > 0, old, new))
        for buffer, group in self._buckets:
            own = buffer.view(group.size(), -1)[group.rank()]
            dist.all_gather_into_tensor(buffer, own.clone(), group=group)
        for matrix in self._matrices:
            self._orthogonalize(*matrix)

    def _orthogonalize(self, shard: StateShard, param: Any, tables: Sequence[Sequence[ShardBox]]) -> None:
        own, local = tables[self._tp.rank()], param.main_grad
        parts = [local] * self._tp.size()
        if any(box_shape(box.hf_box) != self._shapes[box.hf_name] for box in own):
            parts = gather_rows(local[None], self._tp)
        update = torch.empty_like(local)
        for name in dict.fromkeys(box.hf_name for box in own):
            whole = local.new_empty(self._shapes[name])
            for part, table in zip(parts, tables, strict=True):
                for box in table:
                    if box.hf_name == name:
                        whole[box_slices(box.hf_box)] = part[box_slices(box.local_box)]
            scale = _RMS_OF_ADAM * math.sqrt(max(whole.shape))
            direction = orthogonalize(whole.to(param.dtype)).to(local.dtype) * scale
            for box in own:
                if box.hf_name == name:
                    update[box_slices(box.local_box)] = direction[box_slices(box.hf_box)]
        assert shard.main.grad is not None
        shard.main.grad.view(-1).copy_(update.view(-1)[shard.start : shard.start + shard.main.numel()])


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of a matrix [m, n] to between about 0.7 and 1.2, keeping its singular vectors."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_EPSILON)
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _group_by_param(table: Iterable[ShardBox]) -> dict[str, list[ShardBox]]:
    """Group boxes by parameter; the index of an expert becomes the box's leading dimension."""
    found: dict[str, list[ShardBox]] = {}
    for box in table:
        param, expert = find_fused(box.param)
        place = () if expert is None else ((expert, expert + 1),)
        found.setdefault(param, []).append(replace(box, local_box=(*place, *box.local_box)))
    return found
