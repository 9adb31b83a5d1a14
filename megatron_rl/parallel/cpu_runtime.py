# SPDX-License-Identifier: Apache-2.0
"""Runtime that runs unmodified `megatron.core` on a machine without CUDA, over gloo.

megatron.core modules get a *view* of torch as global `torch`: `torch.cuda` is a null runtime on the CPU, and factory
functions map "cuda" to "cpu". Other libraries keep the real torch. `FIXES` patches what the view does not reach; a test
asserts that the private names it uses exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

import torch

from megatron_rl.parallel import pairs
from megatron_rl.parallel.imports import KNOWN_ON_CPU, silence

_PACKAGE = "megatron.core"
_CPU = torch.device("cpu")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like", "ones_like")


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _Stream:
    """Stand-in for CUDA streams and events on a device with one synchronous queue."""

    __init__ = synchronize = wait_stream = wait_event = wait = record = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _cuda_view() -> types.ModuleType:
    cuda: Any = types.ModuleType("torch.cuda")
    cuda.__dict__.update((k, v) for k, v in vars(torch.cuda).items() if not k.startswith("__"))
    cuda.__getattr__ = functools.partial(getattr, torch.cuda)
    the_stream = _Stream()
    for name in ("synchronize", "empty_cache", "set_device", "set_stream", "reset_peak_memory_stats"):
        setattr(cuda, name, _nothing)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.current_device = lambda: _CPU
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *args: the_stream
    cuda.stream = contextlib.nullcontext
    cuda.manual_seed = cuda.manual_seed_all = torch.manual_seed
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.nvtx = types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=contextlib.nullcontext)
    return cuda


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and device is not _CPU and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _torch_view() -> types.ModuleType:
    view: Any = types.ModuleType("torch")
    view.__dict__.update(vars(torch))
    view.__getattr__ = functools.partial(getattr, torch)
    view.cuda = _cuda_view()
    view.distributed = types.ModuleType("torch.distributed")
    vars(view.distributed).update(
        __getattr__=functools.partial(getattr, torch.distributed), all_reduce=pairs.all_reduce
    )
    for name in _FACTORIES:
        setattr(view, name, _on_cpu(getattr(torch, name)))
    return view


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """Report `torch.cuda.FloatTensor` while `function` runs, since the optimizers compare such strings."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        real = torch.Tensor.type

        def cuda_type(self: torch.Tensor, *a: Any, **k: Any) -> Any:
            return real(self, *a, **k) if a or k else real(self).replace("torch.", "torch.cuda.", 1)

        torch.Tensor.type = cuda_type  # a permanent patch would break `torch.compile(fullgraph=True)`
        try:
            return function(*args, **kwargs)
        finally:
            del torch.Tensor.type

    return wrapper


def _fix_random(module: Any) -> None:
    # These bind torch.cuda internals by name; the setter would silently queue its work forever.
    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.default_generator.clone_state() if graph_safe else torch.get_rng_state()

    def set_state(state: Any, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state.get_state() if graph_safe else state)

    module._get_cuda_rng_state, module._set_cuda_rng_state = get_state, set_state


def _fix_mappings(module: Any) -> None:
    # Experts under TP exchange unequal numbers of tokens, which gloo supports only in all-to-all.
    gather, reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_along_first_dim(
        x: torch.Tensor, group: Any, splits: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if splits is None or len(set(splits)) == 1:
            return gather(x, group, splits, use_global_buffer)
        output = x.new_empty(sum(splits), *x.shape[1:])
        copies = x.repeat(group.size(), *[1] * (x.ndim - 1))  # all-to-all: every peer gets one
        torch.distributed.all_to_all_single(output, copies, splits, [len(x)] * group.size(), group=group)
        return output

    def reduce_scatter_along_first_dim(
        x: torch.Tensor, group: Any, splits: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if splits is None or len(set(splits)) == 1:
            return reduce_scatter(x, group, splits, use_global_buffer)
        mine = splits[group.rank()]
        parts = x.new_empty(mine * group.size(), *x.shape[1:])
        torch.distributed.all_to_all_single(parts, x.contiguous(), [mine] * group.size(), splits, group=group)
        return parts.unflatten(0, (group.size(), mine)).sum(0)

    module._gather_along_first_dim = gather_along_first_dim
    module._reduce_scatter_along_first_dim = reduce_scatter_along_first_dim
    _fix_collectives(module)


def _fix_collectives(module: Any) -> None:
    module.dist_all_gather_func = pairs.all_gather_into_tensor
    module.dist_reduce_scatter_func = pairs.reduce_scatter_tensor


def _fix_optimizer(module: Any) -> None:
    for name in FIXES[module.__name__][1]:
        optimizer = getattr(module, name)
        optimizer.__init__ = _with_cuda_type_names(optimizer.__init__)


def _fix_moe_utils(module: Any) -> None:
    real = module.maybe_move_tensor_to_cpu

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):  # all-to-all needs split sizes, not a tensor
            return tensor.numpy()
        return real(tensor, as_numpy, record_stream)

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


_COLLECTIVES = ("dist_all_gather_func", "dist_reduce_scatter_func")

# Module -> its fix, and the private names that the fix relies on.
FIXES: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    # torch.compile would import inductor and need a C++ compiler.
    "megatron.core.jit": (lambda module: module.disable_jit_fuser(), ("disable_jit_fuser",)),
    "megatron.core.tensor_parallel.mappings": (
        _fix_mappings,
        ("_gather_along_first_dim", "_reduce_scatter_along_first_dim", *_COLLECTIVES),
    ),
    "megatron.core.tensor_parallel.layers": (_fix_collectives, _COLLECTIVES),
    "megatron.core.tensor_parallel.random": (_fix_random, ("_get_cuda_rng_state", "_set_cuda_rng_state")),
    "megatron.core.optimizer.optimizer": (_fix_optimizer, ("Float16OptimizerWithFloat16Params",)),
    "megatron.core.optimizer.distrib_optimizer": (_fix_optimizer, ("DistributedOptimizer",)),
    "megatron.core.transformer.moe.moe_utils": (_fix_moe_utils, ("maybe_move_tensor_to_cpu",)),
}


class _Loader(SourceFileLoader):
    """Loader that replaces a megatron.core module's global `torch` with the CPU view of torch."""

    view: types.ModuleType | None = None

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        if getattr(module, "torch", None) is torch:
            vars(module)["torch"] = self.view
        fix, _ = FIXES.get(module.__name__, (_nothing, ()))
        fix(module)


class _Finder:
    """Meta path finder that routes `megatron.core` through `_Loader`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != _PACKAGE and not name.startswith(_PACKAGE + "."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Install the CPU view of torch for `megatron.core`; no-op with CUDA or when already installed.

    Raises:
        RuntimeError: `megatron.core` was imported before and holds the real torch.
    """
    if torch.cuda.is_available() or _Loader.view is not None:
        return
    if _PACKAGE in sys.modules:
        raise RuntimeError("megatron_rl.parallel must be imported before megatron.core on a machine without CUDA")
    _Loader.view = _torch_view()
    sys.meta_path.insert(0, _Finder)
    silence(KNOWN_ON_CPU)
    real = torch.Tensor.cuda

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return self if caller.startswith(_PACKAGE) else real(self, *args, **kwargs)

    torch.Tensor.cuda = cuda  # megatron.core calls it for tied embeddings under PP, and for RoPE under CP
    # glibc keeps the memory of freed tensors: by default it returns most, and each new page costs a fault.
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc accepts
        mallopt(_M_TRIM_THRESHOLD, 512 << 20)


def install_and_find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Install the runtime, and find the `megatron.core` module that is being imported; `None` with CUDA."""
    install()
    return _Finder.find_spec(name, path) if _Loader.view is not None else None
