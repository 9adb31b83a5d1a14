# SPDX-License-Identifier: Apache-2.0
"""Transfers of tensor sets from actor to engines: a rank's pieces are written straight into destination parameters.

Pieces are copied locally, copied from the mapped memory of a peer on the same host (pull: no staging, no message), or
sent in buckets. No rank ever holds a tensor that it does not need. Regularly spaced pieces are copied as one block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_rl.config.sections import HybridConfig
from megatron_rl.engines.protocol import EngineWeights
from megatron_rl.parallel.collectives import Process, connect, current_device
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.transfer.certificate import Certificate, CertifiedParams, count_once
from megatron_rl.transfer.planner import Planner, RankPlan, TransferOp, group_shards
from megatron_rl.weights.megatron_layout import PADDED_PARAMETERS
from megatron_rl.weights.placement_tables import as_table
from megatron_rl.weights.shard_box import ShardBox, box_slices

if TYPE_CHECKING:
    from megatron_rl.transfer.computed import SourceParams
    from megatron_rl.transfer.transports import BucketTransport


Copy = tuple[torch.Tensor, torch.Tensor]  # target, origin


def join_copies(copies: Iterable[Copy]) -> list[Copy]:
    """Join copies of equal shape and spacing on both sides into block copies; no two targets may overlap."""
    ordered = sorted(copies, key=lambda copy: (_storage(copy[0]), _storage(copy[1]), copy[0].data_ptr()))
    runs: list[list[Copy]] = []
    for copy in ordered:
        if runs and _continues(runs[-1], copy):
            runs[-1].append(copy)
        else:
            runs.append([copy])
    return [run[0] if len(run) == 1 else (_join([t for t, _ in run]), _join([o for _, o in run])) for run in runs]


def _continues(run: list[Copy], copy: Copy) -> bool:
    for side in (0, 1):
        last, piece = run[-1][side], copy[side]
        if _storage(last) != _storage(piece) or _layout(last) != _layout(piece):
            return False
        step = piece.storage_offset() - last.storage_offset()
        if step <= 0 or len(run) > 1 and step != last.storage_offset() - run[-2][side].storage_offset():
            return False
    return True


def _join(pieces: list[torch.Tensor]) -> torch.Tensor:
    first, step = pieces[0], pieces[1].storage_offset() - pieces[0].storage_offset()
    return first.as_strided((len(pieces), *first.shape), (step, *first.stride()))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


@dataclass(frozen=True)
class ReshardStats:
    """Bytes of one reshard on one rank, or summed over ranks.

    `bytes_copied` stay on their rank; `bytes_aliased` share storage and are not moved.
    """

    bytes_pulled: int = 0
    bytes_received: int = 0
    bytes_copied: int = 0
    bytes_aliased: int = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes that crossed between ranks."""
        return self.bytes_pulled + self.bytes_received


@dataclass(frozen=True)
class Transport:
    """Settings of the transfer between ranks.

    Attributes:
        bucket_bytes: half the bound on staging memory.
        name: "pull", "buckets", or "auto": pull from peers on the same host, else buckets.
        ranks_per_node: for the check of shared memory.
    """

    bucket_bytes: int
    name: str = "buckets"
    ranks_per_node: int = 1


class Resharder:
    """One rank's part of a reshard, prepared once and run after every optimizer step; building it is collective.

    Args:
        source: this rank's source parameters; on CPU, pulling moves their storage into shared memory in place.
        group: group whose rank numbers the plan uses.
        dtype: of every destination parameter.
        computed: source parameters, on any rank, that are computed when read, and sent in buckets.

    Attributes:
        transport: transport in use: "pull", "buckets", or "pull+buckets".

    Raises:
        UserError: on every rank; pull is requested and impossible.
    """

    def __init__(
        self,
        plan: RankPlan,
        source: SourceParams,
        destination: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        transport: Transport,
        *,
        dtype: torch.dtype,
        computed: frozenset[str] = frozenset(),
    ) -> None:
        for name, tensor in destination.items():
            if tensor.dtype != dtype:
                raise ValueError(f"{name} is {tensor.dtype}; all destination parameters are to be {dtype}")
        self._group = group
        whole = {name: param for name, param in source.items() if isinstance(param, torch.Tensor)}
        self.transport, mapped, near = "buckets", dict[int, dict[str, torch.Tensor]](), set[int]()
        if transport.name != "buckets" and group.size() > 1:
            from megatron_rl.transfer.transports import map_peers

            self.transport, mapped, near = map_peers(plan, whole, group, transport.name, transport.ranks_per_node)
        if computed and self.transport == "pull":
            self.transport = "pull+buckets"

        def find_target(op: TransferOp) -> torch.Tensor:
            return destination[op.dst_param][box_slices(op.dst_box)]

        copies = [(whole, op) for op in plan.local if op.src_param not in computed]
        from_near = [op for peer, ops in plan.receives.items() if peer in near for op in ops]
        pulled = [op for op in from_near if op.src_param not in computed]
        copies += [(mapped[op.src_rank], op) for op in pulled]
        local = [op for op in plan.local if op.src_param in computed]
        self._computed = [(find_target(op), source[op.src_param], box_slices(op.src_box)) for op in local]
        blocks = join_copies((find_target(op), params[op.src_param][box_slices(op.src_box)]) for params, op in copies)
        self._targets, self._origins = [target for target, _ in blocks], [origin for _, origin in blocks]
        self._is_pulling = self.transport != "buckets"
        receives, sends = (
            {peer: [op for op in ops if peer not in near or op.src_param in computed] for peer, ops in side.items()}
            for side in (plan.receives, plan.sends)
        )
        parameters = (tensor for side in (source, destination) for tensor in side.values())  # either may be empty
        self._device = next((tensor.device for tensor in parameters), current_device())
        if self.transport != "pull":
            connect(group, self._device)
        self._buckets: BucketTransport | None = None
        if any(sends.values()) or any(receives.values()):
            from megatron_rl.transfer.transports import BucketTransport

            self._buckets = BucketTransport(sends, receives, source, destination, group, transport.bucket_bytes, dtype)
        self.stats = ReshardStats(
            bytes_pulled=_num_bytes(pulled, dtype),
            bytes_received=_num_bytes([op for ops in receives.values() for op in ops], dtype),
            bytes_copied=_num_bytes(plan.local, dtype),
        )

    @property
    def transient_bytes(self) -> int:
        """Staging memory of one run on this rank."""
        return 0 if self._buckets is None else self._buckets.transient_bytes

    @torch.no_grad()
    def run(self) -> ReshardStats:
        """Move the weights and return this rank's bytes; collective.

        Raises:
            RuntimeError: a peer failed or timed out.
        """
        if self._is_pulling:
            self._meet("before")  # no rank may read a source that its owner is still writing
        if self._targets:
            # Private API of torch, but one kernel for all pieces.
            torch._foreach_copy_(self._targets, self._origins)  # pyright: ignore[reportPrivateImportUsage]
        for target, origin, place in self._computed:
            target.copy_(origin[place])
        if self._buckets is not None:
            self._buckets.run()
        if self._is_pulling:
            self._meet("after")  # no rank may overwrite a source that a peer is still reading
        return self.stats

    def _meet(self, when: str) -> None:
        if self._device.type == "cuda":  # the barrier only orders the hosts, not queued kernels
            torch.cuda.synchronize(self._device)
        try:
            dist.barrier(group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._group.rank()} gave up waiting for the other ranks {when} the pull of a reshard: {error}"
            ) from error


def _num_bytes(ops: Sequence[TransferOp], dtype: torch.dtype) -> int:
    return sum(op.num_elements for op in ops) * dtype.itemsize


@dataclass(frozen=True)
class TensorSet:
    """Tensors that one transfer moves.

    Attributes:
        shapes: logical tensors by name.
        params: the actor's parameters on this rank.
        source, destination: placement tables of any actor or engine rank.
        computed: names in `params`, on any rank, that are computed when read.
        dtype: of the engine parameters to write; the model's if `None`.
        prepare: called before each transfer, on every rank of the job.
    """

    shapes: Mapping[str, tuple[int, ...]]
    params: SourceParams
    source: Callable[[int], Sequence[ShardBox]]
    destination: Callable[[int], Sequence[ShardBox]]
    computed: frozenset[str] = frozenset()
    dtype: torch.dtype | None = None
    prepare: Callable[[], None] = lambda: None

    def only(self, names: frozenset[str]) -> TensorSet:
        """Return the part with the named logical tensors."""
        return replace(
            self,
            shapes={name: size for name, size in self.shapes.items() if name in names},
            source=lambda rank: as_table(self.source(rank)).only(names),
            destination=lambda rank: as_table(self.destination(rank)).only(names),
        )


@dataclass(frozen=True)
class TransferContext:
    """Ranks, group and settings of the transfers of one model.

    Attributes:
        actor_key: actor rank -> key, equal for ranks with equal placements.
        shared: per rank, engine parameters that share the actor's storage.
        dtype: of most engine parameters.
    """

    actor_ranks: range
    actor_key: Callable[[int], Hashable]
    engine: EngineWeights
    shared: Sequence[frozenset[str]]
    engines: EngineRanks
    process: Process
    group: dist.ProcessGroup
    config: HybridConfig
    dtype: torch.dtype


def split_types(tensors: TensorSet, context: TransferContext, wide: frozenset[str]) -> list[TensorSet]:
    """Split a tensor set by dtype: the engine's usual dtype, and float32 for `wide` (routers)."""
    wide = wide.intersection(tensors.shapes)
    if not wide:
        return [tensors]
    return [
        replace(tensors.only(frozenset(tensors.shapes) - wide), dtype=context.dtype),
        replace(tensors.only(wide), dtype=torch.float32),
    ]


class Transfer:
    """A prepared transfer of one tensor set; building it is collective."""

    def __init__(self, tensors: TensorSet, context: TransferContext) -> None:
        self._prepare, dtype = tensors.prepare, tensors.dtype or context.dtype
        engine, rank, ranks_per_node = context.engine, context.process.rank, context.process.ranks_per_node
        source = group_shards(tensors.source, context.actor_key, context.actor_ranks)
        destination = group_shards(
            lambda rank: as_table(tensors.destination(rank)).without(context.shared[rank]),
            lambda rank: (engine.shard_key(rank), context.shared[rank]),
            sorted(rank for ranks in context.engines.of for rank in ranks),
        )
        self.resharder = Resharder(
            Planner(source, destination, ranks_per_node=ranks_per_node).plan(rank),
            tensors.params,
            {name: param for name, param in engine.params.items() if tensors.dtype is None or param.dtype == dtype},
            context.group,
            Transport(context.config.bucket_bytes, context.config.transport, ranks_per_node),
            dtype=dtype,
            computed=tensors.computed,
        )
        index, place = context.engines.find(rank)
        ranks = context.engines.of[index] if index >= 0 else ()
        whole = group_shards(
            lambda place: tensors.destination(ranks[place]),
            lambda place: engine.shard_key(ranks[place]),
            range(len(ranks)),
        )
        counted = count_once(whole, place)
        written = {placement.param for placement in counted}
        padded = [name for name in tensors.params if name.endswith(PADDED_PARAMETERS)]
        self.certificate = Certificate(
            tensors.shapes,
            CertifiedParams(tensors.params, count_once(source, rank), padded),
            CertifiedParams(engine.params, counted, [name for name in engine.padded_params if name in written]),
            dtype=dtype,
            num_engines=len(context.engines.of),
            engine=index,
            group=context.group,
        )

    def run(self) -> None:
        """Run the transfer; collective."""
        self._prepare()
        self.resharder.run()
