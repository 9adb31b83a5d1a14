# SPDX-License-Identifier: Apache-2.0
"""Parameters that peers on the same host can map: shared memory on CPU, CUDA IPC on a GPU.

The owner moves its storages into shared memory in place; peers map them and read pieces directly. The memory has no
name on disk and is freed with the last process.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from megatron_rl.parallel.pairs import host_name

_SHARED_MEMORY = Path("/dev/shm")
_HEADROOM = 64 << 20


@dataclass(frozen=True)
class Export:
    """Location of a rank's parameters, for peers on the same host.

    Attributes:
        storages: on CPU, path of the open file and its size in bytes; on CUDA, torch's (rebuild function, arguments).
        params: index of a storage; offset, shape, stride and dtype of the view.
    """

    host: str
    storages: tuple[Any, ...]
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
