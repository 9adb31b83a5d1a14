# SPDX-License-Identifier: Apache-2.0
"""Execute a ReshardPlan: local copies straight into place, the rest in bounded buckets, point to point.

No rank ever holds a tensor that it does not need; staging memory is bounded by `bucket_bytes` per
direction, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.resharding.buckets import Bucket, bucket_elements, cut_into_buckets
from megatron_rl.resharding.planner import ReshardPlan
from megatron_rl.weights.placement import box_shape, box_slices


@dataclass(frozen=True)
class ReshardStats:
    """What one reshard did on all ranks together.

    Attributes:
        bytes_moved: crossed between ranks.
        bytes_copied: copied inside a rank.
        bytes_aliased: shared storage, nothing moved.
    """

    bytes_moved: int
    bytes_copied: int
    bytes_aliased: int = 0


class Resharder:
    """One side of a plan, made ready once and run after every optimizer step.

    Args:
        plan: the same on every rank.
        source: this rank's source parameters by name.
        destination: this rank's destination parameters by name; written in place.
        group: group whose rank numbers the plan uses.
        bucket_bytes: bound on the staging memory of this rank per direction.
        dtype: of every destination parameter; sources of another type are converted before they travel.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        source: Mapping[str, torch.Tensor],
        destination: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        bucket_bytes: int,
        dtype: torch.dtype,
    ) -> None:
        rank = group.rank()
        self._source, self._destination, self._group = source, destination, group
        self._local = plan.local(rank)
        for name, tensor in destination.items():
            if tensor.dtype != dtype:
                raise ValueError(f"{name} is {tensor.dtype}; all destination parameters travel as {dtype}")
        self._dtype, self._device = dtype, next(iter(source.values())).device
        # Every pair gets an equal share of the bound, the same on all ranks, so that both ends of a
        # pair cut their stream at the same places.
        per_pair = max(1, bucket_bytes // dtype.itemsize // max(1, plan.max_peers()))
        self._sends = {peer: cut_into_buckets(ops, per_pair) for peer, ops in plan.sends(rank).items()}
        self._receives = {peer: cut_into_buckets(ops, per_pair) for peer, ops in plan.receives(rank).items()}
        self._num_rounds = max(map(len, (*self._sends.values(), *self._receives.values())), default=0)
        self.stats = ReshardStats(
            bytes_moved=plan.moved_elements() * dtype.itemsize,
            bytes_copied=plan.kept_elements() * dtype.itemsize,
        )

    @torch.no_grad()
    def run(self) -> ReshardStats:
        """Move the weights; collective over the group."""
        for op in self._local:
            self._destination[op.dst_param][box_slices(op.dst_box)].copy_(
                self._source[op.src_param][box_slices(op.src_box)])
        for index in range(self._num_rounds):
            self._run_round(index)
        return self.stats

    def _run_round(self, index: int) -> None:
        works, arrivals = [], []
        for peer, buckets in self._receives.items():
            if index < len(buckets):
                buffer = torch.empty(bucket_elements(buckets[index]), dtype=self._dtype, device=self._device)
                works.append(dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=peer))
                arrivals.append((buffer, buckets[index]))
        for peer, buckets in self._sends.items():
            if index < len(buckets):
                works.append(dist.P2POp(dist.isend, self._pack(buckets[index]), group=self._group, group_peer=peer))
        for work in dist.batch_isend_irecv(works) if works else ():
            work.wait()
        for buffer, bucket in arrivals:
            self._scatter(buffer, bucket)

    def _pack(self, bucket: Bucket) -> torch.Tensor:
        buffer = torch.empty(bucket_elements(bucket), dtype=self._dtype, device=self._device)
        at = 0
        for op in bucket:
            piece = self._source[op.src_param][box_slices(op.src_box)]
            buffer[at : at + op.num_elements].view(piece.shape).copy_(piece)
            at += op.num_elements
        return buffer

    def _scatter(self, buffer: torch.Tensor, bucket: Bucket) -> None:
        at = 0
        for op in bucket:
            piece = buffer[at : at + op.num_elements].view(box_shape(op.dst_box))
            self._destination[op.dst_param][box_slices(op.dst_box)].copy_(piece)
            at += op.num_elements
