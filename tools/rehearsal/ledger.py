# SPDX-License-Identifier: Apache-2.0
"""Effects of a rehearsal's operations: device memory, collectives, host synchronization.

Storages count, rounded up to the allocator's 512 bytes, until release. Not covered: allocator fragmentation, the
driver's context, kernel workspaces. Fake tensors have no values; the host reads 1.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_BLOCK = 512
_HERE = str(Path(__file__).parent)
_HOUSE = str(Path(__file__).parents[2] / "megatron_rl")
_COPIES = ("aten._to_copy.default", "aten.copy_.default")
_NO_FAKE_KERNEL = ("aten._fused_adam", "aten._foreach_")


@dataclass
class Phase:
    """Effects within a phase, by source line of ours or megatron-core's.

    Attributes:
        peak: maximum bytes held.
        at_peak: allocating lines at the peak, largest first.
        live: bytes held at the end.
        held: `live` by line.
        traffic: (operation, group) -> calls, bytes of whole tensors, bytes that a rank sends.
        syncs: waits for the device.
        copies: between host and device.
        copied: bytes by direction.
        host_collectives: collectives of host tensors.
        mixes: operations on both host and device tensors.
    """

    peak: int = 0
    at_peak: list[tuple[str, int]] = field(default_factory=list)
    live: int = 0
    held: dict[str, int] = field(default_factory=dict)
    traffic: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    syncs: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    copied: Counter[str] = field(default_factory=Counter)
    host_collectives: Counter[str] = field(default_factory=Counter)
    mixes: Counter[str] = field(default_factory=Counter)
    operations: int = 0

    def count_operation(self) -> None:
        """Count an operation."""
        self.operations += 1

    def raise_peak(self, held: int) -> bool:
        """Raise the peak; return whether it rose."""
        is_higher = held > self.peak
        self.peak = max(self.peak, held)
        return is_higher

    def describe_peak(self, by_line: list[tuple[str, int]]) -> None:
        """Store the peak's composition."""
        self.at_peak = by_line


class Ledger(TorchDispatchMode):
    """A recorder of operations inside a FakeTensorMode.

    Args:
        count_true: number of true elements to assume in a mask.
    """

    def __init__(self, count_true: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        self._count_true = count_true
        self._live: dict[int, tuple[int, str]] = {}
        self._by_line: Counter[str] = Counter()  # sums of `_live`
        self._now = 0
        self._names: dict[str, str] = {}
        self.phase = Phase()
        self._peak_is_new = False
        self._is_elsewhere = False

    @contextmanager
    def of_others(self) -> Iterator[None]:
        """Attribute memory that is allocated within the block to other ranks."""
        self._is_elsewhere = True
        yield
        self._is_elsewhere = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record, including storage resizes and `tolist`, which dispatch modes miss."""
        resize, tolist = torch.UntypedStorage.resize_, self._wrap_tolist(torch.Tensor.tolist)
        with (
            patch.object(torch.UntypedStorage, "resize_", self._wrap_resize(resize)),
            patch.object(torch.Tensor, "tolist", tolist),
            patch.object(FakeTensor, "tolist", tolist),
            self,
        ):
            yield

    def name_group(self, group: dist.ProcessGroup, name: str) -> None:
        """Name a group; the first name stays."""
        self._names.setdefault(group.group_name, name)

    def note_wait(self, line: str) -> None:
        """Count a wait for the device."""
        self.phase.syncs[line] += 1

    def note_copy(self, way: str, size: int) -> None:
        """Add bytes in a direction such as "cpu to cuda"."""
        self.phase.copied[way] += size

    def begin(self) -> None:
        """Begin a phase."""
        self.phase = Phase(peak=self._now, at_peak=self._describe_live())

    def end(self) -> Phase:
        """End the phase."""
        self._settle()
        held = dict(self._describe_live(None))
        found, self.phase = replace(self.phase, live=self._now, held=held), Phase(peak=self._now)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # dispatched again with the local tensor
            return NotImplemented
        kwargs = kwargs or {}
        self.phase.count_operation()
        name, tensors = str(func), _list_tensors((*args, *kwargs.values()))
        if name.startswith("c10d."):
            self._count_collective(name, args, tensors)
            if "coalesced" in name:
                return FakeWork().boxed()
        found = self._stand_in(name, func, args, tensors)
        if found is not NotImplemented:
            self._watch(found)
            return found
        self._note_copy(name, args, kwargs)
        result = func(*args, **kwargs)
        self._watch(result)
        return result

    def _stand_in(self, name: str, func: Any, args: Any, tensors: list[torch.Tensor]) -> Any:
        """Compute operations that depend on values or lack a fake kernel, else return `NotImplemented`.

        Host masks mark errors, so they are all false.
        """
        on_device = any(tensor.device.type == "cuda" for tensor in tensors)
        if name == "aten._local_scalar_dense.default":
            return self._read_value(func, args[0])
        if name == "aten.nonzero.default" and isinstance(args[0], FakeTensor):
            if not on_device:
                return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
            self.phase.syncs[_find_line()] += 1
            return args[0].new_empty((self._count_true(args[0]), args[0].dim()), dtype=torch.int64)
        if name == "aten.masked_select.default" and on_device:
            self.phase.syncs[_find_line()] += 1
            return args[0].new_empty(self._count_true(args[1]))
        if name == "aten._fused_rms_norm.default" and on_device:
            factor = args[0].new_empty((*args[0].shape[: -len(args[1])], *[1] * len(args[1])), dtype=torch.float32)
            return torch.empty_like(args[0]), factor
        if name == "aten._fused_rms_norm_backward.default" and on_device:
            return torch.empty_like(args[1]), torch.empty_like(args[4])
        if name.startswith(_NO_FAKE_KERNEL) and name.split(".")[1].endswith("_"):
            if len({tensor.device.type for tensor in tensors if tensor.dim()}) > 1:
                self.phase.mixes[_find_line()] += 1
            _check_shapes(func, args)
            return None
        return NotImplemented

    def _read_value(self, func: Any, tensor: torch.Tensor) -> Any:
        if tensor.device.type == "cuda":
            self.phase.syncs[_find_line()] += 1
            return _make_value(tensor.dtype)
        try:
            return func(tensor)
        except DataDependentOutputException:
            return _make_value(tensor.dtype)

    def _note_copy(self, name: str, args: Any, kwargs: Any) -> None:
        if name not in _COPIES:
            return
        source = args[1] if name == "aten.copy_.default" else args[0]
        to = args[0].device if name == "aten.copy_.default" else kwargs.get("device")
        if to is None or not isinstance(source, torch.Tensor) or source.device.type == torch.device(to).type:
            return
        is_waited = torch.device(to).type == "cpu" and not (kwargs.get("non_blocking") or args[2:3] == (True,))
        way = f"{source.device.type} to {torch.device(to).type}"
        self.phase.copies[f"{way}: {_find_line()}"] += 1
        self.note_copy(way, source.numel() * source.element_size())
        if is_waited:
            self.phase.syncs[_find_line()] += 1

    def _count_collective(self, name: str, args: Any, tensors: list[torch.Tensor]) -> None:
        group = next(
            (x for x in tree_leaves(args) if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())),
            None,
        )
        if group is None or not tensors:
            return
        found = dist.ProcessGroup.unbox(group)
        if found.size() == 1:
            return
        if any(tensor.device.type == "cpu" for tensor in tensors):
            self.phase.host_collectives[_find_line()] += 1
        operation = name.split(".")[1].strip("_")
        size = _find_whole(operation, args, tensors)
        key = operation, self._names.get(found.group_name, f"{found.size()} ranks")
        counted = self.phase.traffic.setdefault(key, [0, 0, 0.0])
        counted[0] += 1
        counted[1] += size
        counted[2] += size * _find_share(operation, found.size())

    def _watch(self, result: Any) -> None:
        for tensor in _list_tensors((result,)):
            if tensor.device.type != "cuda":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._live:
                self._add(key, 0 if self._is_elsewhere else storage.nbytes(), _find_line())
                weakref.finalize(storage, self._remove, key)

    def _add(self, key: int, size: int, line: str) -> None:
        size = -(-size // _BLOCK) * _BLOCK
        self._live[key] = size, line
        self._by_line[line] += size
        self._now += size
        if self.phase.raise_peak(self._now):
            self._peak_is_new = True

    def _remove(self, key: int) -> None:
        self._settle()
        size, line = self._live.pop(key, (0, ""))
        self._by_line[line] -= size
        self._now -= size

    def _settle(self) -> None:
        """Describe the peak before memory is released."""
        if self._peak_is_new and self._now == self.phase.peak:
            self.phase.describe_peak(self._describe_live())
        self._peak_is_new = False

    def _describe_live(self, count: int | None = 12) -> list[tuple[str, int]]:
        return (+self._by_line).most_common(count)

    def _wrap_resize(self, real: Any) -> Any:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            key = storage._cdata
            _, line = self._live.get(key, (0, ""))
            result = real(storage, size)
            if line:
                self._remove(key)
                self._add(key, size, line)
            return result

        return resize

    def _wrap_tolist(self, real: Any) -> Any:
        def tolist(tensor: torch.Tensor) -> Any:
            if tensor.device.type == "cuda":
                self.phase.syncs[_find_line()] += 1
            elif not isinstance(tensor, FakeTensor):
                return real(tensor)
            return _make_list(tensor.shape, _make_value(tensor.dtype))

        return tolist


def _list_tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """List tensors as `tree_leaves` does, in a fourth of the time."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _list_tensors(value)
    return found


def _find_whole(operation: str, args: Any, tensors: list[torch.Tensor]) -> int:
    """Return a collective's bytes, of whole tensors."""
    if operation in (
        "allgather",
        "reduce_scatter",
    ):  # outputs, inputs: one is a list per rank, the other a shard
        return sum(tensor.nbytes for tensor in tree_leaves(args[operation == "reduce_scatter"]))
    if "coalesced" in operation:  # lists of whole tensors and of their shards
        lists = [x for x in args if isinstance(x, list | tuple)]
        return max(sum(tensor.nbytes for tensor in x if isinstance(tensor, torch.Tensor)) for x in lists)
    return max(tensor.nbytes for tensor in tensors)


def _find_share(operation: str, size: int) -> float:
    """Return the bytes that a rank sends in a collective, relative to the bytes of the whole tensor.

    Collectives are rings; see `planning/communication.py`.
    """
    if operation.startswith(("send", "recv")):
        return float(operation.startswith("send"))
    return (2 if operation.startswith("allreduce") else 1) * (size - 1) / size


def _make_value(dtype: torch.dtype) -> Any:
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


def _make_list(shape: Any, value: Any) -> Any:
    return [_make_list(shape[1:], value) for _ in range(shape[0])] if shape else value


def _check_shapes(func: Any, args: Any) -> None:
    """Check lists of tensors, operands of a fused elementwise operation, for equal shapes."""
    lists = [x for x in args if isinstance(x, list | tuple) and x and all(isinstance(y, torch.Tensor) for y in x)]
    for first, *others in zip(*lists, strict=False):
        for other in others:
            if other.dim() and other.shape != first.shape:
                raise RuntimeError(f"{func}: shapes {tuple(first.shape)} and {tuple(other.shape)}")


def _find_line() -> str:
    """Return the calling line of ours or megatron-core's, else outside torch."""
    first = "elsewhere"
    for file, line in _walk():
        if "/megatron/core/" in file:
            return f"megatron/core/{file.rpartition('/megatron/core/')[2]}:{line}"
        if file.startswith(_HOUSE):
            return f"megatron_rl{file.removeprefix(_HOUSE)}:{line}"
        if first == "elsewhere":
            first = f"{Path(file).name}:{line}"
    return first


def _walk() -> Iterator[tuple[str, int]]:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and not file.startswith(_HERE):
            yield file, frame.f_lineno
        frame = frame.f_back
