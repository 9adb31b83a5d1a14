# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on a CPU: a capture records ATen operations, a replay runs them again on the same storages.

A replay skips the surrounding Python, so a step that depends on captured values or on moved memory differs from an
eager step. Before it, the pool's memory is filled with NaN, as smaller graphs reuse the memory of larger ones.

As on a GPU, a capture refuses (`CaptureError`) host reads, value-dependent shapes, random numbers, host tensors among
device tensors, and memory of another capture. Only a backward may read the forward captured before it, and must be
replayed directly after it. Collectives are replayed. Not covered: streams, kernels, NCCL inside a capture.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch._C._distributed_c10d import Work
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron_rl.models import attention
from megatron_rl.parallel import collectives
from megatron_rl.training import fixed_memory
from tools.rehearsal import masked_attention

_READ_ON_HOST = (torch.Tensor.tolist, torch.Tensor.numpy)
_FACTORIES = (torch.tensor, torch.empty, torch.zeros, torch.ones, torch.full, torch.arange)
_INDEXING = ("aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default")
_RANDOM_IF_DROPPED = ("attention", "dropout")  # they draw only for dropout, which is off
_RUBBISH = 255  # byte value that makes floats NaN and integers -1
_NO_BACKWARD = -1


class CaptureError(RuntimeError):
    """An operation that cannot be captured."""


@dataclass
class Pool:
    """Memory shared by captures.

    Attributes:
        made: storage -> the graph that allocated it.
        num_bytes: by graph.
        captured, replayed: the last such graph.
    """

    made: dict[int, RecordedGraph] = field(default_factory=dict)
    num_bytes: dict[RecordedGraph, int] = field(default_factory=dict)
    captured: RecordedGraph | None = None
    replayed: RecordedGraph | None = None

    def add(self, graph: RecordedGraph, num_bytes: int) -> None:
        """Add a captured graph."""
        self.captured, self.num_bytes[graph] = graph, num_bytes

    def clear(self, graph: RecordedGraph, kept: Set[int]) -> None:
        """Overwrite the memory of all graphs except storages `kept`, before a replay of `graph`."""
        self.replayed = graph
        for memory in (memory for graph in self.num_bytes for memory in graph.memory):
            if _storage_of(memory) not in kept:
                memory.fill_(_RUBBISH)


_POOLS: dict[tuple[int, int], Pool] = {}
_NUMBERS = count(1)


class RecordedGraph:
    """A stand-in for `torch.cuda.CUDAGraph`.

    Attributes:
        memory: allocated storages, as bytes.
    """

    def __init__(self) -> None:
        self._tape: list[tuple[Any, Any, Any, Any]] = []
        self.memory: list[torch.Tensor] = []
        self._pool = Pool()
        self._before: RecordedGraph | None = None
        self._activations: set[int] = set()

    @property
    def num_operations(self) -> int:
        """Count recorded operations."""
        return len(self._tape)

    def register_generator_state(self, state: Any) -> None:
        """Do nothing."""

    @contextmanager
    def record(self, pool: tuple[int, int]) -> Iterator[None]:
        """Capture the block."""
        self._pool = _POOLS[pool]
        self._before = self._pool.captured
        waiting = Work.wait
        mode = _Recorder(self)

        def wait(work: Any, *args: Any) -> Any:
            with mode.unseen():  # gloo copies from its own buffers here
                return waiting(work, *args)

        with patch.object(Work, "wait", wait), _HostWatch(mode), mode:
            yield
        left = self._pool.num_bytes[self._before] if self._before and self._activations else 0
        self._pool.add(self, left + sum(memory.nbytes for memory in self.memory))

    def replay(self) -> None:
        """Run the operations again on overwritten memory."""
        if self._activations and self._pool.replayed is not self._before:
            raise CaptureError("a backward is replayed, and not directly after the forward that it belongs to")
        self._pool.clear(self, self._activations)
        with torch.no_grad():
            for function, args, kwargs, recorded in self._tape:
                self._run(function, args, kwargs, recorded)

    def _run(self, function: Any, args: Any, kwargs: Any, recorded: Any) -> None:
        found = function(*args, **kwargs)
        if str(function).startswith("c10d."):
            for leaf in tree_leaves(found):
                if isinstance(leaf, torch.ScriptObject) and "Work" in str(leaf._type()):
                    Work.unbox(leaf).wait()
            return
        for old, new in zip(_list_tensors(recorded), _list_tensors(found), strict=True):
            if _storage_of(old) != _storage_of(new):
                old.copy_(new)

    def keep(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operation of the capture for replay.

        Its tensors are kept as aliases, since `tensor.data = ...` moves a tensor.
        """
        read = {_storage_of(tensor) for tensor in _list_tensors((args, kwargs))}
        for tensor in _list_tensors(result):
            key = _storage_of(tensor)
            if key not in read and key not in self._pool.made:
                self._pool.made[key] = self
                self.memory.append(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))

        if not str(function).startswith(("aten.empty", "aten.new_empty")):  # nothing to replay
            aliases = tree_map(
                lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs, result)
            )
            self._tape.append((function, *aliases))

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether this capture allocated it."""
        return self._pool.made.get(_storage_of(tensor)) is self

    def may_touch(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is this capture's or, in a backward, the preceding one's."""
        key = _storage_of(tensor)
        maker = self._pool.made.get(key, self)
        if maker is self._before and maker is not None and torch._C._current_graph_task_id() != _NO_BACKWARD:
            self._activations.add(key)
            return True
        return maker is self


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph, self._is_seen = graph, True
        self._on_host: dict[int, torch.Tensor] = {}  # referenced, so that their keys are not reused

    @contextmanager
    def unseen(self) -> Iterator[None]:
        before, self._is_seen = self._is_seen, False
        try:
            yield
        finally:
            self._is_seen = before

    def note_on_host(self, tensor: torch.Tensor) -> None:
        """Mark a tensor that would be on the host in a run on a GPU."""
        self._on_host[_storage_of(tensor)] = tensor

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether it was made without a device, or is the host generator's state (1-D bytes that no operation made)."""
        is_state = tensor.dtype is torch.uint8 and tensor.dim() == 1 and not self._graph.has_made(tensor)
        return is_state or _storage_of(tensor) in self._on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_seen:
            return func(*args, **kwargs)
        tensors = _list_tensors((args, kwargs))
        hosted = [tensor for tensor in tensors if self._is_on_host(tensor)]
        if func is torch.ops.aten.lift_fresh.default or (tensors and len(hosted) == len(tensors)):
            result = func(*args, **kwargs)  # host work is not replayed
            for tensor in _list_tensors(result):
                self.note_on_host(tensor)
            return result
        why = _explain_refusal(func, args, kwargs)
        if any(tensor.dim() for tensor in hosted):
            why = "a tensor of the host among others"
        elif not all(self._graph.may_touch(tensor) for tensor in tensors):
            why = "memory of another capture, which may have been used again"
        if why:
            raise CaptureError(f"{func}: {why}")
        result = func(*args, **kwargs)
        self._graph.keep(func, args, kwargs, result)
        return result


class _HostWatch(TorchFunctionMode):
    """Detects tensors without a device, and host reads, outside of dispatch."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_ON_HOST:
            raise CaptureError(f"Tensor.{func.__name__}: the host reads values")
        has_device = (kwargs or {}).get("device") is not None
        if func is torch.tensor and has_device:
            raise CaptureError("torch.tensor: values come from the host")
        if func not in _FACTORIES or has_device:
            return func(*args, **(kwargs or {}))
        with self._recorder.unseen():
            made = func(*args, **(kwargs or {}))
        self._recorder.note_on_host(made)
        return made


def _explain_refusal(function: Any, args: Any, kwargs: Any) -> str:
    """Return the reason to refuse an operation, or ""."""
    name, tags = str(function), function.tags
    if name in _INDEXING:
        index = [x for x in args[1] if x is not None]
        is_fill = name != _INDEXING[0] and args[2].dim() == 0
        return "" if is_fill or all(x.dtype not in (torch.bool, torch.uint8) for x in index) else "a shape from values"
    if torch.Tag.data_dependent_output in tags:
        return "the host reads values"
    if torch.Tag.dynamic_output_shape in tags:
        return "a shape from values"
    if torch.Tag.nondeterministic_seeded in tags and not any(word in name for word in _RANDOM_IF_DROPPED):
        return "random numbers"
    return ""


def _list_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Record CUDA graphs and use a GPU's attention backend within the block."""
    masked_attention.install()
    with ExitStack() as stack:
        random: Any = sys.modules["megatron.core.tensor_parallel.random"]
        for cuda in (torch.cuda, random.torch.cuda):  # megatron-core has its own torch on a CPU
            for name, value in _NAMES.items():
                stack.enter_context(patch.object(cuda, name, value))
        stack.enter_context(patch.object(attention, "choose_attention_backend", lambda *kind: "efficient"))
        # Pairs of ranks exchange values through memory that appears in no operation.
        stack.enter_context(patch.object(fixed_memory, "FixedMemory", Pages))
        stack.enter_context(patch.object(collectives, "find_pair", lambda group, num_bytes: None))
        yield


class Pages(fixed_memory.FixedMemory):
    """Pages of a CPU that lose their values when they are given back, and keep their addresses."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.block = torch.frombuffer(self._pages, dtype=torch.uint8)

    def map(self) -> None:
        """Do nothing: pages come with their first use."""

    def unmap(self) -> None:
        """Give the pages back to the system."""
        self._pages.madvise(mmap.MADV_DONTNEED)


class _Stream:
    """A CPU's only queue."""

    def wait_stream(self, other: _Stream) -> None:
        """Do nothing."""


_STREAM = _Stream()


def _make_pool() -> tuple[int, int]:
    handle = (0, next(_NUMBERS))
    _POOLS[handle] = Pool()
    return handle


def _describe_memory() -> list[dict[str, Any]]:
    """Return a segment per pool of its largest graph's size."""
    return [
        {"segment_pool_id": handle, "total_size": max(pool.num_bytes.values(), default=0)}
        for handle, pool in _POOLS.items()
    ]


def _capture(graph: RecordedGraph, pool: tuple[int, int], **options: Any) -> Any:
    return graph.record(pool)


_NAMES: dict[str, Any] = {
    "CUDAGraph": RecordedGraph,
    "graph": _capture,
    "graph_pool_handle": _make_pool,
    "memory_snapshot": _describe_memory,
    "Stream": _Stream,
    "current_stream": lambda *device: _STREAM,
    "stream": lambda stream: nullcontext(),
    "initial_seed": torch.initial_seed,
}
