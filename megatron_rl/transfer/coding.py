# SPDX-License-Identifier: Apache-2.0
"""Transfer of the actor's matrices to engines that store them in eight bits, as codes and row scales.

Codes are computed on the actor, which halves the bytes moved. A scale covers its whole row across ranks, so the
engine's weights do not depend on the layout of the actor.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_rl.transfer.computed import CodedParam
from megatron_rl.transfer.executor import TensorSet, TransferContext
from megatron_rl.transfer.planner import group_shards
from megatron_rl.weights.quantization import SCALE_SUFFIX, CodeFormat, find_scales, list_scales
from megatron_rl.weights.shard_box import ShardBox, box_slices


class RowScales:
    """Row scales of the matrices in a tensor set; every rank of the job makes the same calls."""

    def __init__(self, tensors: TensorSet, context: TransferContext, code_format: CodeFormat) -> None:
        self._tensors, self._group = tensors, context.group
        self._code_format: CodeFormat = code_format
        rank, device = context.process.rank, context.process.device
        self._pieces = list(tensors.source(rank)) if rank in context.actor_ranks else []
        self._firsts: dict[str, int] = {}
        total = 0
        for name, size in tensors.shapes.items():
            self._firsts[name], total = total, total + size[0]
        self._rows = torch.zeros(total, 1, device=device)  # rows of all matrices, concatenated
        heights = {p.param: 0 for p in self._pieces}
        for p in self._pieces:
            heights[p.param] = max(heights[p.param], p.local_box[0][1])
        # Scales of this rank's parameters by name, [n, 1] float32.
        self.params = {name: torch.ones(height, 1, device=device) for name, height in heights.items()}

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute the scales from the current weights; collective."""
        self._rows.zero_()
        for p in self._pieces:
            rows = self._find_rows(p)
            piece = self._tensors.params[p.param][box_slices(p.local_box)]
            torch.maximum(rows, piece.float().abs().amax(1, keepdim=True), out=rows)
        dist.all_reduce(self._rows, dist.ReduceOp.MAX, group=self._group)
        self._rows.copy_(find_scales(self._rows, self._code_format))
        for p in self._pieces:
            self.params[p.param][slice(*p.local_box[0])] = self._find_rows(p)

    def _find_rows(self, piece: ShardBox) -> torch.Tensor:
        first = self._firsts[piece.hf_name]
        return self._rows[first + piece.hf_box[0][0] : first + piece.hf_box[0][1]]


def split_coded(
    tensors: TensorSet, context: TransferContext, code_format: CodeFormat, matrices: frozenset[str]
) -> list[TensorSet]:
    """Split a tensor set into unquantized tensors, codes of `matrices`, and their scales."""
    coded = tensors.only(matrices.intersection(tensors.shapes))
    scales = RowScales(coded, context, code_format)
    params = {name: CodedParam(tensors.params[name], scale, code_format) for name, scale in scales.params.items()}
    names = {
        p.param
        for shard in group_shards(coded.source, context.actor_key, context.actor_ranks)
        for p in shard.placements
    }
    return [
        replace(tensors.only(frozenset(tensors.shapes) - matrices), dtype=context.dtype),
        replace(coded, params=params, computed=frozenset(names), dtype=torch.int8, prepare=scales.refresh),
        TensorSet(
            {name: (size[0], 1) for name, size in coded.shapes.items()},
            {name + SCALE_SUFFIX: scale for name, scale in scales.params.items()},
            lambda rank: list_scales(coded.source(rank)),
            lambda rank: list_scales(coded.destination(rank)),
            dtype=torch.float32,
        ),
    ]
