# SPDX-License-Identifier: Apache-2.0
"""Exchange of CPU tensors between two ranks of one host through shared memory.

gloo costs 0.4 to 0.9 ms of CPU for the small tensors of a tensor parallel layer; a pair costs 0.04 ms. A sum of two
numbers has the same bits in either order, so results equal gloo's. Collectives without a pair (GPUs, other groups or
hosts, larger tensors) use torch.distributed.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.parallel import collectives

_SLOT_BYTES, _SLOTS = 8 << 20, 2  # pages are allocated only when a slot is used
_TENSOR, _COUNTS = 128, 128  # upper bit of a byte: a tensor was sent; lower bits: the count of tensors read
_PATIENCE = timedelta(minutes=30)  # torch's default


class Pair:
    """One rank's end of a shared-memory connection to another; both make the same calls in the same order.

    A byte in a pipe signals a tensor in the memory. It also carries the number of tensors that its sender has read,
    modulo 128: a slot is reused only after it was read.

    Args:
        mine, theirs: [slots, bytes] uint8, written and read by this rank.
        inbox, outbox: file descriptors of pipes.
    """

    def __init__(
        self, mine: torch.Tensor, theirs: torch.Tensor, inbox: int, outbox: int, timeout: timedelta | None
    ) -> None:
        self._mine, self._theirs, self._inbox, self._outbox = mine, theirs, inbox, outbox
        self._sent = self._acknowledged = self._arrived = self._read = 0
        self._milliseconds = int((timeout or _PATIENCE) / timedelta(milliseconds=1))
        self._poll = select.poll()
        self._poll.register(inbox, select.POLLIN)

    @staticmethod
    def fits(num_bytes: int) -> bool:
        """Return whether a tensor of this size fits a slot of the shared memory."""
        return num_bytes <= _SLOT_BYTES

    def send(self, values: torch.Tensor) -> None:
        """Send a copy of a tensor; blocks while the peer has two unread."""
        while self._sent - self._acknowledged == _SLOTS:
            self._listen()
        _shape(self._mine[self._sent % _SLOTS], values).copy_(values.detach())
        self._sent += 1
        self._tell(_TENSOR)

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return the next tensor, shaped as `like`, valid until the next call; the next `send` acknowledges it."""
        while self._arrived == self._read:
            self._listen()
        slot = self._theirs[self._read % _SLOTS]
        self._read += 1
        return _shape(slot, like)

    def receive(self, output: torch.Tensor) -> None:
        """Copy the next received tensor into `output`, and acknowledge it."""
        output.copy_(self.take(output))
        self._tell(0)

    def all_gather_into_tensor(self, output: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Gather the values of both ranks of the group, of equal shape, into `output` [2, ...]."""
        self.send(values)
        rows, rank = output.view(2, *values.shape), group.rank()
        rows[rank].copy_(values)
        rows[1 - rank].copy_(self.take(values))

    def _tell(self, kind: int) -> None:
        os.write(self._outbox, bytes((kind | self._read % _COUNTS,)))

    def _listen(self) -> None:
        if not self._poll.poll(self._milliseconds):
            raise RuntimeError(f"Timed out waiting {self._milliseconds}ms for the other rank of a pair")
        heard = os.read(self._inbox, 64)
        if not heard:
            raise RuntimeError("Connection closed by peer: the other rank of a pair is gone")
        for byte in heard:
            self._arrived += byte >= _TENSOR
            self._acknowledged += (byte - self._acknowledged) % _COUNTS


def _shape(slot: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return slot[: like.nbytes].view(like.dtype).view(like.shape)


def open_pair(group: dist.ProcessGroup, timeout: timedelta | None) -> None:
    """Open a pair for a group of two ranks on one host without a GPU; collective."""
    if group.size() == 2 and not torch.cuda.is_available() and group not in collectives.PAIRS:
        for pair in open_star(group, timeout):
            collectives.PAIRS[group] = pair


def open_star(group: dist.ProcessGroup, timeout: timedelta | None) -> list[Pair]:
    """Open pairs between the group's first rank and each other rank; collective.

    Returns:
        On the first rank its pairs, in rank order; on another the pair with the first. Empty on all ranks if they are
        on several hosts, or if the host forbids access to other processes.
    """
    rank, size = group.rank(), group.size()
    ends = {peer: _End() for peer in (range(1, size) if rank == 0 else (0,))}
    found: list[Any] = [None] * size
    offers = {peer: (end.memory, end.mouth) for peer, end in ends.items()}
    dist.all_gather_object(found, (host_name(), os.getpid(), offers), group=group)
    opened: list[tuple[torch.Tensor, int]] = []
    for peer in ends:
        host, process, of_peer = found[peer]
        memory, mouth = of_peer[rank]
        if host == host_name():
            try:
                theirs = os.open(f"/proc/{process}/fd/{memory}", os.O_RDWR)
                opened.append((_map(theirs), os.open(f"/proc/{process}/fd/{mouth}", os.O_WRONLY)))
            except OSError:  # the host forbids access to another process: use gloo
                pass
    dist.all_gather_object(found, len(opened) == len(ends), group=group)
    for end in ends.values():
        os.close(end.mouth)  # keep the write end in the peer only, so that its exit closes the pipe
    if not all(found):
        return []
    return [
        Pair(_map(end.memory), theirs, end.inbox, outbox, timeout)
        for end, (theirs, outbox) in zip(ends.values(), opened, strict=True)
    ]


class _End:
    """File descriptors that one rank offers a peer: memory that it writes, and both ends of its pipe."""

    def __init__(self) -> None:
        self.inbox, self.mouth = os.pipe()
        self.memory = os.memfd_create("megatron_rl", os.MFD_CLOEXEC)
        os.ftruncate(self.memory, _SLOTS * _SLOT_BYTES)


def _map(descriptor: int) -> torch.Tensor:
    memory = mmap.mmap(descriptor, _SLOTS * _SLOT_BYTES)
    os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8).view(_SLOTS, _SLOT_BYTES)


def host_name() -> str:
    """Return a name of this machine that differs between restarts and between containers of one host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = os.readlink("/proc/self/ns/pid") if Path("/proc/self/ns/pid").exists() else ""
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}/{namespace}"


class _Done:
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return immediately, since the operation is complete."""
        return True


def all_gather_into_tensor(
    output: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Gather as torch.distributed does, through shared memory if possible."""
    pair = collectives.find_pair(group, values.nbytes)
    if pair is None or group is None:
        return dist.all_gather_into_tensor(output, values, group=group, async_op=async_op)
    pair.all_gather_into_tensor(output, values, group)
    return _Done() if async_op else None


def reduce_scatter_tensor(
    output: torch.Tensor,
    values: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce-scatter as torch.distributed does, through shared memory if possible."""
    pair = collectives.find_pair(group, output.nbytes)
    if pair is None or group is None or op != dist.ReduceOp.SUM:
        return dist.reduce_scatter_tensor(output, values, op=op, group=group, async_op=async_op)
    rows, rank = values.view(2, *output.shape), group.rank()
    pair.send(rows[1 - rank])
    torch.add(rows[rank], pair.take(output), out=output)
    return _Done() if async_op else None


def all_reduce(
    values: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """All-reduce as torch.distributed does, through shared memory if possible."""
    pair = collectives.find_pair(group, values.nbytes)
    if pair is None or op != dist.ReduceOp.SUM:
        return dist.all_reduce(values, op=op, group=group, async_op=async_op)
    pair.send(values)
    values.add_(pair.take(values))
    return _Done() if async_op else None
