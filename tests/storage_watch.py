# SPDX-License-Identifier: Apache-2.0
"""How much memory the tensors of this process hold at once, counted in storages, by whatever thread."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageWatch(TorchDispatchMode):
    """Sums the bytes of all storages after every operation, at their current sizes.

    Attributes:
        peak: the most bytes above the initial ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and not thing.is_meta:
                self._watch(thing)
        self._before, self.peak = self._sum(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta:
                self._watch(tensor)
        self.peak = max(self.peak, self._sum() - self._before)
        return result

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._live[key] = weakref.ref(storage)
            weakref.finalize(storage, self._live.pop, key, None)

    def _sum(self) -> int:
        found = [reference() for reference in list(self._live.values())]
        return sum(storage.nbytes() for storage in found if storage is not None)


def measure_peak(work: Callable[[], object]) -> int:
    """The most bytes that tensors made by `work()` held at once."""
    with StorageWatch() as watch:
        work()
    return watch.peak
