# SPDX-License-Identifier: Apache-2.0
"""Transports between ranks: mapped memory of peers on the same host (pull), and messages in buckets of bounded size.

* Pull: shared memory on CPU, CUDA IPC on a GPU. The owner moves its storages into shared memory in place; peers map
  them and read pieces directly. The memory has no name on disk and is freed with the last process.
* Buckets: both ends process the same operations in the same order and so cut the stream at the same places. In turn t a
  rank sends to the rank t places ahead and receives from the rank t places behind; two buckets are in flight and two in
  preparation. Large contiguous pieces are transferred in place, without a buffer.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from megatron_rl.parallel.collectives import current_device, gather_objects
from megatron_rl.parallel.pairs import host_name
from megatron_rl.transfer.planner import RankPlan, TransferOp
from megatron_rl.types import UserError
from megatron_rl.weights.shard_box import Box, box_shape, box_slices

if TYPE_CHECKING:
    from megatron_rl.transfer.computed import ComputedParam, SourceParams

log = logging.getLogger(__name__)
_SHARED_MEMORY = Path("/dev/shm")
_HEADROOM = 64 << 20
Bucket = list[TransferOp]


def map_peers(
    plan: RankPlan, source: Mapping[str, torch.Tensor], group: dist.ProcessGroup, name: str, ranks_per_node: int
) -> tuple[str, dict[int, dict[str, torch.Tensor]], set[int]]:
    """Map the parameters of peers on the same host; collective.

    Args:
        name: "pull" or "auto", as in `executor.Resharder`.

    Returns:
        The transport to use ("pull", "buckets" or "pull+buckets"), the mapped parameters by rank, and the ranks of this
        host, none with "buckets".

    Raises:
        UserError: on every rank; pull is requested and impossible.
    """
    missing = gather_objects(missing_shared_memory(source, ranks_per_node), group)
    if max(missing):
        if name == "auto":
            return "buckets", {}, set()
        raise UserError(
            f"/dev/shm lacks {max(missing) >> 20} MiB for the weights that peers are to pull",
            source="hybrid.transport=pull",
            expected="room for the parameters of all ranks of the host",
            hint="enlarge /dev/shm (docker: --shm-size), or use hybrid.transport=buckets",
        )
    exports = gather_objects(export_params(source), group)
    near = {peer for peer, export in enumerate(exports) if export.host == exports[group.rank()].host}
    mapped, failure = {}, ""
    try:
        mapped = {peer: map_params(exports[peer], current_device()) for peer in plan.receives if peer in near}
    except RuntimeError as error:  # no link between two GPUs
        failure = f"rank {group.rank()} cannot map a peer's memory: {str(error).splitlines()[0]}"
    found = gather_objects((len(mapped) < len(plan.receives), failure), group)
    failure = next((said for _, said in found if said), "")
    if failure and name == "auto":
        if group.rank() == 0:
            log.warning("weights travel in buckets: %s", failure)
        return "buckets", {}, set()
    is_remote = any(remote for remote, _ in found)
    if name == "pull" and (failure or is_remote):
        raise UserError(
            failure or "weights must come from another host",
            source="hybrid.transport=pull",
            expected="all ranks on one host, and a link between any two of its GPUs",
            hint="use hybrid.transport=auto: pull where it can be done, buckets elsewhere",
        )
    return ("pull+buckets" if is_remote else "pull"), mapped, near


@dataclass(frozen=True)
class Export:
    """Location of a rank's parameters, for peers on the same host."""

    host: str
    # On CPU, path of the open file and its size in bytes; on CUDA, torch's (rebuild function, arguments).
    storages: tuple[Any, ...]
    # Index of a storage; offset, shape, stride and dtype of the view.
    params: dict[str, tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]]


def missing_shared_memory(params: Mapping[str, torch.Tensor], ranks_per_node: int) -> int:
    """Return the bytes that /dev/shm lacks for the parameters of all ranks of the node; 0 if they fit.

    Writing more than fits there kills a process, so this is checked first.
    """
    if any(tensor.is_cuda for tensor in params.values()):
        return 0
    wanted = sum(s.nbytes() for s in _unique_storages(params) if not s.is_shared())
    limit = os.statvfs(_SHARED_MEMORY)
    return max(0, wanted * ranks_per_node + _HEADROOM - limit.f_bavail * limit.f_frsize) if wanted else 0


def export_params(params: Mapping[str, torch.Tensor]) -> Export:
    """Move the parameters' storages into shared memory (once) and describe them."""
    storages = _unique_storages(params)
    numbers = {storage.data_ptr(): number for number, storage in enumerate(storages)}
    described = {
        name: (
            numbers[tensor.untyped_storage().data_ptr()],
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
        )
        for name, tensor in params.items()
    }
    # Sharing changes the address of a storage in place, hence after the numbering by address.
    return Export(host_name(), tuple(_share(storage) for storage in storages), described)


def map_params(export: Export, device: torch.device) -> dict[str, torch.Tensor]:
    """Map a peer's parameters, to be read only.

    Args:
        device: this rank's own.

    Raises:
        RuntimeError: (CUDA's own) there is no link between the two GPUs.
    """
    storages = [_map(recipe, device) for recipe in export.storages]
    mapped = {}
    for name, (number, offset, shape, stride, dtype) in export.params.items():
        empty = torch.empty(0, dtype=dtype, device=storages[number].device)
        mapped[name] = empty.set_(storages[number], offset, shape, stride)
    return mapped


def _unique_storages(params: Mapping[str, torch.Tensor]) -> list[torch.UntypedStorage]:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in params.values()}
    return list(storages.values())


def _share(storage: torch.UntypedStorage) -> Any:
    if storage.device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return reduce_tensor(whole)
    descriptor, size = storage._share_fd_cpu_()
    return f"/proc/{os.getpid()}/fd/{descriptor}", size


def _map(recipe: Any, device: torch.device) -> torch.UntypedStorage:
    first, second = recipe
    if isinstance(first, str):
        return cast(torch.UntypedStorage, torch.UntypedStorage.from_file(first, True, second))
    return first(*move_recipe(first, second, device)).untyped_storage()


def move_recipe(rebuild: Callable[..., torch.Tensor], arguments: tuple[Any, ...], device: torch.device) -> list[Any]:
    """Return the arguments with which torch's function `rebuild` maps a peer's CUDA memory on `device`."""
    moved = list(arguments)
    moved[list(inspect.signature(rebuild).parameters).index("storage_device")] = device.index
    return moved


def split_op(op: TransferOp, max_elements: int) -> Iterator[TransferOp]:
    """Cut one transfer along its outermost dimensions into pieces of at most `max_elements`."""
    if op.num_elements <= max_elements:
        yield op
        return
    shape = box_shape(op.dst_box)
    dim = next(i for i, size in enumerate(shape) if size > 1)
    per_index = op.num_elements // shape[dim]
    step = max(1, max_elements // per_index)
    for first in range(0, shape[dim], step):
        last = min(first + step, shape[dim])
        part = replace(op, src_box=_cut(op.src_box, dim, first, last), dst_box=_cut(op.dst_box, dim, first, last))
        yield from split_op(part, max_elements)


def _cut(box: Box, dim: int, first: int, last: int) -> Box:
    start = box[dim][0]
    return (*box[:dim], (start + first, start + last), *box[dim + 1 :])


def cut_into_buckets(ops: Iterable[TransferOp], max_elements: int) -> list[Bucket]:
    """Fill buckets with at most `max_elements` each; a piece of at least an eighth of it has its own bucket."""
    buckets: list[Bucket] = []
    filled = max_elements
    for op in ops:
        for part in split_op(op, max_elements):
            is_large = 8 * part.num_elements >= max_elements
            if is_large or filled + part.num_elements > max_elements:
                buckets.append([])
                filled = 0
            buckets[-1].append(part)
            filled = max_elements if is_large else filled + part.num_elements
    return buckets


@dataclass(frozen=True)
class _ComputedPiece:
    param: ComputedParam
    box: Box

    @property
    def shape(self) -> torch.Size:
        return torch.Size(box_shape(self.box))

    def numel(self) -> int:
        return self.shape.numel()

    def read(self) -> torch.Tensor:
        return self.param[box_slices(self.box)]


_Outgoing = torch.Tensor | _ComputedPiece
_P = TypeVar("_P", torch.Tensor, _Outgoing)


@dataclass(frozen=True)
class _Exchange:
    """One receive and one send in flight."""

    to: int
    origin: int
    works: list[dist.Work]
    scattered: list[tuple[torch.Tensor, torch.Tensor]]  # (received, target); empty if received in place


class BucketTransport:
    """Exchange of the remote pieces of one rank's plan.

    Args:
        sends, receives: peer rank -> pieces.
        bucket_bytes: half the bound on staging memory.
    """

    def __init__(
        self,
        sends: Mapping[int, Sequence[TransferOp]],
        receives: Mapping[int, Sequence[TransferOp]],
        source: SourceParams,
        destination: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        bucket_bytes: int,
        dtype: torch.dtype,
    ) -> None:
        self._group, self._dtype = group, dtype
        self._device = next(tensor.device for side in (source, destination) for tensor in side.values())
        limit = max(1, bucket_bytes // 2 // dtype.itemsize)

        def view(param: torch.Tensor | ComputedParam, box: Box) -> _Outgoing:
            return param[box_slices(box)] if isinstance(param, torch.Tensor) else _ComputedPiece(param, box)

        sent = {
            peer: [[view(source[op.src_param], op.src_box) for op in bucket] for bucket in cut_into_buckets(ops, limit)]
            for peer, ops in sends.items()
        }
        received = {
            peer: [
                [destination[op.dst_param][box_slices(op.dst_box)] for op in bucket]
                for bucket in cut_into_buckets(ops, limit)
            ]
            for peer, ops in receives.items()
        }
        # Exchanges: rank to send to, pieces, rank to receive from, targets. First buckets of all peers precede second
        # ones, so that pieces for several peers stay in the CPU cache.
        self._turns: list[tuple[int, list[_Outgoing], int, list[torch.Tensor]]] = []
        rank, size = group.rank(), group.size()
        longest = max((len(buckets) for side in (sent, received) for buckets in side.values()), default=0)
        for index in range(longest):
            for turn in range(1, size):
                to, origin = (rank + turn) % size, (rank - turn) % size
                there, back = sent.get(to, []), received.get(origin, [])
                outgoing = there[index] if index < len(there) else []
                incoming = back[index] if index < len(back) else []
                if outgoing or incoming:
                    self._turns.append((to, outgoing, origin, incoming))
        self._out_elements = self._count_staged(outgoing for _, outgoing, _, _ in self._turns)
        self._in_elements = self._count_staged(incoming for *_, incoming in self._turns)

    def _count_staged(self, buckets: Iterable[Sequence[_Outgoing]]) -> int:
        return max((sum(p.numel() for p in pieces) for pieces in buckets if self._direct(pieces) is None), default=0)

    @property
    def transient_bytes(self) -> int:
        """Largest staging memory of one exchange on this rank."""
        return 2 * (self._out_elements + self._in_elements) * self._dtype.itemsize

    def _direct(self, bucket: Sequence[_Outgoing]) -> torch.Tensor | None:
        """Return the parameter's own memory if the bucket is one contiguous piece of it."""
        piece = bucket[0] if len(bucket) == 1 else None
        if not isinstance(piece, torch.Tensor) or not piece.is_contiguous() or piece.dtype != self._dtype:
            return None
        return piece.view(-1)

    def run(self) -> None:
        """Exchange everything; collective over the ranks involved.

        Raises:
            RuntimeError: a peer failed or timed out.
        """
        out_buffers, in_buffers = self._buffers(self._out_elements), self._buffers(self._in_elements)
        in_flight: list[_Exchange] = []
        for number, (to, outgoing, origin, incoming) in enumerate(self._turns):
            operations, scattered = [], []
            if incoming:
                flat, scattered = self._stage(incoming, in_buffers[number % 2])
                operations.append(dist.P2POp(dist.irecv, flat, group=self._group, group_peer=origin))
            if outgoing:
                flat, packed = self._stage(outgoing, out_buffers[number % 2])
                for view, piece in packed:
                    view.copy_(piece if isinstance(piece, torch.Tensor) else piece.read())
                operations.append(dist.P2POp(dist.isend, flat, group=self._group, group_peer=to))
            in_flight.append(_Exchange(to, origin, dist.batch_isend_irecv(operations), scattered))
            if len(in_flight) == 2:
                self._finish(in_flight.pop(0))
        for exchange in in_flight:
            self._finish(exchange)

    def _buffers(self, size: int) -> list[torch.Tensor]:
        return [torch.empty(size, dtype=self._dtype, device=self._device) for _ in range(2)]

    def _stage(self, pieces: Sequence[_P], buffer: torch.Tensor) -> tuple[torch.Tensor, list[tuple[torch.Tensor, _P]]]:
        direct = self._direct(pieces)
        if direct is not None:
            return direct, []
        sizes = [piece.numel() for piece in pieces]
        flat = buffer[: sum(sizes)]
        return flat, [(part.view(piece.shape), piece) for part, piece in zip(flat.split(sizes), pieces, strict=True)]

    def _finish(self, exchange: _Exchange) -> None:
        try:
            for work in exchange.works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._group.rank()} gave up waiting for a bucket of a reshard "
                f"(to rank {exchange.to}, from rank {exchange.origin}): {error}"
            ) from error
        for view, piece in exchange.scattered:
            piece.copy_(view)
