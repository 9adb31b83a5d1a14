# SPDX-License-Identifier: Apache-2.0
"""Device memory that is given back and taken again at the same addresses, which a CUDA graph has captured.

torch's allocator returns other addresses each time. Here the driver reserves addresses once, and physical memory is
mapped to them and unmapped, as vLLM's sleep does it. Other processes cannot open such memory, hence NCCL does not
register it in a captured collective: a registration would still point to memory that was given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from megatron_rl.training.packed_model import HostMemory, align


class FixedMemory:
    """Mapped device memory of constant address; not counted by torch's statistics."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._driver = driver = import_module("cuda.bindings.driver")
        self._kind, self._access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        for place in (self._kind.location, self._access.location):
            place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            place.id = torch.cuda.current_device() if device.index is None else device.index
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        unit = self._call("cuMemGetAllocationGranularity", self._kind, recommended)
        self._size = -(-num_bytes // unit) * unit
        self._address, self._handle = self._call("cuMemAddressReserve", self._size, 0, 0, 0), None
        self.map()
        array = {"data": (int(self._address), False), "shape": (num_bytes,), "typestr": "|u1", "version": 2}
        # All of it, uint8; accessible only while it is mapped.
        self.block = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device=device)

    def map(self) -> None:
        """Take physical memory, with arbitrary values, unless mapped."""
        if self._handle is None:
            handle = self._call("cuMemCreate", self._size, self._kind, 0)
            self._call("cuMemMap", self._address, self._size, 0, handle, 0)
            self._call("cuMemSetAccess", self._address, self._size, [self._access], 1)
            self._handle = handle

    def unmap(self) -> None:
        """Give the physical memory back, unless given back; waits for the device."""
        if self._handle is not None:
            torch.cuda.synchronize()
            self._call("cuMemUnmap", self._address, self._size)
            self._call("cuMemRelease", self._handle)
            self._handle = None

    def split(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors of the given types and shapes within the block."""
        parts = self.block[: sum(map(align, tensors))].split([align(tensor) for tensor in tensors])
        return [part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in zip(parts, tensors, strict=True)]

    def _call(self, name: str, *values: Any) -> Any:
        error, *found = getattr(self._driver, name)(*values)
        if error == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            torch.cuda.empty_cache()  # torch keeps what it has freed
            error, *found = getattr(self._driver, name)(*values)
        if error == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {self._size} bytes of fixed address")
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {error}")
        return found[0] if found else None


class FixedGradients:
    """Gradient buffer of megatron-core in memory of constant address, with the buffer's own methods for offloading."""

    def __init__(self, buffer: Any) -> None:
        self._gradients = whole = buffer.grad_data
        self._memory = FixedMemory(whole.nbytes, whole.device)
        storage = self._memory.block.untyped_storage()
        for x in (whole, *(b.grad_data for b in buffer.buckets), *(p.main_grad for p in buffer.params)):
            x.set_(storage, x.storage_offset(), x.shape, x.stride())

    def offload_to_cpu(self, **moved: bool) -> None:
        """Give the memory back."""
        self._memory.unmap()

    def reload_from_cpu(self, **moved: bool) -> None:
        """Take memory again, filled with zeros."""
        self._memory.map()
        self._gradients.zero_()


class FixedStates(HostMemory):
    """Host memory whose tensors return to the same device memory, once their sizes stay the same."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._memory: FixedMemory | None = None

    def store(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to the host, and give their device memory back."""
        copies = super().store(tensors)
        if self._memory is not None:
            self._memory.unmap()
        return copies

    def load(self, copies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to the device, asynchronously to the host."""
        if not copies:  # a float32 model before the first update
            return []
        size = sum(map(align, copies))
        if self._memory is None or len(self._memory.block) != size:
            self._memory = FixedMemory(size, self._device)
        self._memory.map()
        return [
            part.copy_(copy, non_blocking=True) for part, copy in zip(self._memory.split(copies), copies, strict=True)
        ]
