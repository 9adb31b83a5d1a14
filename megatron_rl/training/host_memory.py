# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory for offloaded tensors, page-locked once and reused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

_ALIGNMENT = 512


class HostMemory:
    """Pinned block of host memory of one owner, which grows on demand."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block = torch.empty(0, dtype=torch.uint8)

    def store(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to the host; the copies are complete on return and valid until the next call."""
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        size, is_gpu = sum(sizes), self._device.type == "cuda"
        if size > len(self._block):
            if is_gpu and len(self._block):
                torch.cuda.synchronize(self._device)  # a copy may still be reading it
                unpin_memory(self._block.data_ptr())
            self._block = torch.empty(size, dtype=torch.uint8)
            if is_gpu:
                pin_memory(self._block.data_ptr(), size)  # `Tensor.pin_memory` would round up to a power of two
        copies = []
        for tensor, part in zip(tensors, self._block[:size].split(sizes), strict=True):
            copy = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor, non_blocking=True))
        if is_gpu:
            torch.cuda.current_stream(self._device).synchronize()
        return copies

    def load(self, copies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to new device tensors, asynchronously to the host."""
        return [copy.to(self._device, non_blocking=True, copy=True) for copy in copies]
