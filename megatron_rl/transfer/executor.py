# SPDX-License-Identifier: Apache-2.0
"""Transfers of tensor sets from actor to engines: a rank's pieces are written straight into destination parameters.

Pieces are copied locally, copied from the mapped memory of a peer on the same host (pull: no staging, no message), or
sent in buckets. No rank ever holds a tensor that it does not need. Regularly spaced pieces are copied as one block.

A certificate shows that source and destination hold the same bits, tensor by tensor. The digest of a logical tensor
does not depend on any layout: over its elements at row-major position i,

    D = sum_i bits(x_i) * (2 i + 1)   modulo 2^64

where bits(x_i) is the element's bit pattern. Each rank sums its own pieces; one all-reduce gives D. Every factor is
odd: one wrong bit always changes D, two exchanged elements change it by 2 (i - j) (bits_j - bits_i), and a missing or
stale piece by its share. Each piece is counted once: on the source by its first owner, on the destination once per
engine. Padding outside logical tensors must be zero on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap, takewhile
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_rl.config.sections import HybridConfig
from megatron_rl.engines.protocol import EngineWeights
from megatron_rl.parallel.collectives import Process, connect, current_device, gather_objects
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.transfer.planner import Planner, RankPlan, Shard, TransferOp, group_shards
from megatron_rl.weights.megatron_layout import PADDED_PARAMETERS
from megatron_rl.weights.placement_tables import as_table
from megatron_rl.weights.shard_box import Box, ShardBox, box_slices, box_volume, fill_in_order

if TYPE_CHECKING:
    from megatron_rl.transfer.computed import SourceParams
    from megatron_rl.transfer.transports import BucketTransport


CHUNK_ELEMENTS = 1 << 20
SAMPLE_SHARE = 0.02  # share of the bytes that one turn of `Certificate.verify` compares
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


class Resharder:
    """One rank's part of a reshard, prepared once and run after every optimizer step; building it is collective.

    Args:
        source: this rank's source parameters; on CPU, pulling moves their storage into shared memory in place.
        group: group whose rank numbers the plan uses.
        dtype: of every destination parameter.
        bucket_bytes: half the bound on staging memory.
        transport: "pull", "buckets", or "auto": pull from peers on the same host, else buckets.
        ranks_per_node: for the check of shared memory.
        computed: source parameters, on any rank, that are computed when read, and sent in buckets.

    Raises:
        UserError: on every rank; pull is requested and impossible.
    """

    def __init__(
        self,
        plan: RankPlan,
        source: SourceParams,
        destination: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        transport: str = "buckets",
        ranks_per_node: int = 1,
        computed: frozenset[str] = frozenset(),
    ) -> None:
        for name, tensor in destination.items():
            if tensor.dtype != dtype:
                raise ValueError(f"{name} is {tensor.dtype}; all destination parameters are to be {dtype}")
        self._group = group
        whole = {name: param for name, param in source.items() if isinstance(param, torch.Tensor)}
        self.transport, mapped, near = "buckets", dict[int, dict[str, torch.Tensor]](), set[int]()
        if transport != "buckets" and group.size() > 1:
            from megatron_rl.transfer.transports import map_peers

            self.transport, mapped, near = map_peers(plan, whole, group, transport, ranks_per_node)
        if computed and self.transport == "pull":
            self.transport = "pull+buckets"  # transport in use: "pull", "buckets", or "pull+buckets"

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

            self._buckets = BucketTransport(sends, receives, source, destination, group, bucket_bytes, dtype)
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
    """Tensors that one transfer moves."""

    shapes: Mapping[str, tuple[int, ...]]  # logical tensors by name
    params: SourceParams  # the actor's parameters on this rank
    # source, destination: placement tables of any actor or engine rank.
    source: Callable[[int], Sequence[ShardBox]]
    destination: Callable[[int], Sequence[ShardBox]]
    computed: frozenset[str] = frozenset()  # names in `params`, on any rank, that are computed when read
    dtype: torch.dtype | None = None  # of the engine parameters to write; the model's if `None`
    prepare: Callable[[], None] = lambda: None  # called before each transfer, on every rank of the job

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
    """Ranks, group and settings of the transfers of one model."""

    actor_ranks: range
    actor_key: Callable[[int], Hashable]  # actor rank -> key, equal for ranks with equal placements
    engine: EngineWeights
    shared: Sequence[frozenset[str]]  # per rank, engine parameters that share the actor's storage
    engines: EngineRanks
    process: Process
    group: dist.ProcessGroup
    config: HybridConfig
    dtype: torch.dtype  # of most engine parameters


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
            dtype=dtype,
            bucket_bytes=context.config.bucket_bytes,
            transport=context.config.transport,
            ranks_per_node=ranks_per_node,
            computed=tensors.computed,
        )
        index, _ = context.engines.places.get(rank, (-1, 0))
        counted = [p for p in tensors.destination(rank) if box_volume(p.hf_box)] if index >= 0 else []
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


class CertificateError(RuntimeError):
    """Mismatch of weights between training and rollout; names tensor, rank, box and both digests."""


def view_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View numbers as signed integers of their size."""
    return tensor.view({4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.element_size()])


def compute_digest(piece: torch.Tensor, hf_box: Box, hf_shape: tuple[int, ...]) -> torch.Tensor:
    """Compute the share of one piece in its tensor's digest; int64 scalar (arithmetic wraps modulo 2^64).

    Args:
        piece: the elements, any strides; only the first and the last dimension may be cut.
        hf_box: box of the piece in the logical tensor.
        hf_shape: shape of the logical tensor.
    """
    width = hf_shape[-1]
    matrix = view_bits(piece).reshape(-1, piece.shape[-1])
    column_start = hf_box[-1][0]
    row_start = hf_box[0][0] * math.prod(hf_shape[1:-1]) if len(hf_shape) > 1 else 0
    columns = torch.arange(matrix.shape[1], dtype=torch.int64, device=piece.device) + column_start
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    step = max(1, CHUNK_ELEMENTS // max(1, matrix.shape[1]))
    for first in range(0, matrix.shape[0], step):
        bits = matrix[first : first + step].to(torch.int64)  # at most CHUNK_ELEMENTS at a time
        rows = torch.arange(first, first + bits.shape[0], dtype=torch.int64, device=piece.device) + row_start
        # sum over rows and columns of bits * (2 (row * width + column) + 1)
        total += (bits.sum(1) * (2 * width * rows + 1)).sum() + (bits.sum(0) * (2 * columns)).sum()
    return total


@dataclass(frozen=True)
class CertifiedParams:
    """One side of a reshard on this rank."""

    params: SourceParams
    counted: Sequence[ShardBox]  # placements whose digest this rank contributes
    params_with_padding: Sequence[str]  # parameters with elements that no logical tensor fills


def count_once(shards: Sequence[Shard], rank: int) -> list[ShardBox]:
    """Return the placements of `rank` whose box no earlier rank (or placement) holds."""
    own = next((shard for shard in shards if shard.ranks[0] == rank), None)
    if own is None:  # an earlier rank holds the same
        return []
    counted: dict[tuple[str, Box], ShardBox] = {}
    for p in own.placements:
        if box_volume(p.hf_box):
            counted.setdefault((p.hf_name, p.hf_box), p)
    mine = {name for name, _ in counted}
    for shard in takewhile(lambda shard: shard is not own, shards):
        table = as_table(shard.placements)
        for _, name, kind in table.rows:
            if name in mine:
                counted.pop((name, table.boxes[kind][1]), None)
    return list(counted.values())


class Certificate:
    """Comparison of both sides after a reshard; collective, as is building it.

    An engine may hold a tensor several times, by ranks or in one parameter: the digests of all copies are summed.

    Args:
        source: this rank's side, in which all ranks together count each element once; converted to the other's dtype.
        destination: this rank's side, in which an engine's ranks count each element as often as they hold it.
        num_engines, engine: engines in the job, and this rank's engine; -1 if it has none.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        source: CertifiedParams,
        destination: CertifiedParams,
        *,
        dtype: torch.dtype,
        num_engines: int,
        engine: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._shapes, self._source, self._destination = dict(shapes), source, destination
        self._dtype, self._engine, self._group = dtype, engine, group
        sizes = {name: math.prod(shape) for name, shape in self._shapes.items()}
        self._rotation = fill_in_order(sizes, SAMPLE_SHARE * sum(sizes.values()))
        held = [dict.fromkeys(sizes, 0) for _ in range(1 + num_engines)]
        for row, side in ((0, source), (1 + engine, destination)):
            for p in side.counted:
                held[row][p.hf_name] += box_volume(p.hf_box)
        elements, whole = torch.tensor([[*row.values()] for row in held]), torch.tensor([*sizes.values()])
        dist.all_reduce(elements, group=group)
        self._is_uneven = (elements[0] != whole) | (elements[1:] % whole != 0) | (elements[1:] == 0)  # no whole copies
        self._copies, self._places = elements[1:] // whole, {name: index for index, name in enumerate(sizes)}

    def verify(self, turn: int | None = None) -> int:
        """Compare all tensors, or part `turn` of a rotation over them in parts of 2 %, and return the number compared.

        Raises:
            CertificateError: on every rank.
        """
        names = list(self._shapes) if turn is None else self._rotation[turn % len(self._rotation)]
        padding = [*self._dirty_padding(self._source, "training"), *self._dirty_padding(self._destination, "rollout")]
        digests = torch.zeros(1 + len(self._copies), len(names) + 1, dtype=torch.int64)
        digests[:, -1] = len(padding)
        column = {name: index for index, name in enumerate(names)}
        for row, side in ((0, self._source), (1 + self._engine, self._destination)):
            wanted = [p for p in side.counted if p.hf_name in column]
            found = [compute_digest(self._piece(side, p), p.hf_box, self._shapes[p.hf_name]) for p in wanted]
            for p, digest in zip(wanted, found, strict=True):
                digests[row, column[p.hf_name]] += digest.cpu()
        dist.all_reduce(digests, group=self._group)
        places = [self._places[name] for name in names]
        expected = digests[0, :-1] * self._copies[:, places]
        wrong = ((digests[1:, :-1] != expected) | self._is_uneven[:, places]).nonzero().tolist()
        if wrong or bool(digests[0, -1] > 0):
            self._raise_if_wrong(wrong, expected, digests[1:], names, padding)
        return len(names)

    def _piece(self, side: CertifiedParams, placement: ShardBox) -> torch.Tensor:
        return side.params[placement.param][*starmap(slice, placement.local_box)].to(self._dtype)

    def _dirty_padding(self, side: CertifiedParams, name: str) -> list[str]:
        found = []
        for param in side.params_with_padding:
            tensor = side.params[param]
            assert isinstance(tensor, torch.Tensor), "adapters are added to matrices without padding"
            filled = max((p.local_box[0][1] for p in side.counted if p.param == param), default=None)
            if filled is not None and filled < len(tensor) and tensor[filled:].count_nonzero():
                found.append(f"{param} on rank {self._group.rank()} ({name}): rows {filled}:{len(tensor)} are not zero")
        return found

    def _raise_if_wrong(
        self, wrong: list[list[int]], expected: torch.Tensor, found: torch.Tensor, names: list[str], padding: list[str]
    ) -> None:
        lines = [line for rank_lines in gather_objects(padding, self._group) for line in rank_lines]
        for engine, index in wrong[:3]:
            trained, other = _hex(expected[engine, index]), _hex(found[engine, index])
            lines.append(f"{names[index]}: training {trained}, rollout engine {engine} {other}")
            lines += self._locate(names[index])
        raise CertificateError("weights differ between training and rollout:\n  " + "\n  ".join(lines))

    def _locate(self, name: str) -> list[str]:
        rank, sides = self._group.rank(), {"source": self._source, "destination": self._destination}
        mine = {
            key: [(p.hf_box, rank, p.param, self._piece(side, p).cpu()) for p in side.counted if p.hf_name == name]
            for key, side in sides.items()
        }
        everyone = gather_objects(mine, self._group)  # only on the error path, for one tensor
        truth = torch.empty(self._shapes[name], dtype=self._dtype)
        for rank_pieces in everyone:
            for box, _, _, piece in rank_pieces["source"]:
                truth[box_slices(box)] = piece
        found = []
        for rank_pieces in everyone:
            for box, rank, param, piece in rank_pieces["destination"]:
                right = truth[box_slices(box)]
                if not torch.equal(view_bits(right), view_bits(piece)):
                    differing = int((view_bits(right) != view_bits(piece)).sum())
                    found.append(
                        f"  rank {rank} {param}, box {list(box)}: {differing} of {piece.numel()} elements, "
                        f"digest {_hex(compute_digest(right, box, self._shapes[name]))} expected, "
                        f"{_hex(compute_digest(piece, box, self._shapes[name]))} found"
                    )
        return found[:4]


def _hex(digest: torch.Tensor) -> str:
    return f"{int(digest) & (1 << 64) - 1:016x}"
