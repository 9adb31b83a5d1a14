# SPDX-License-Identifier: Apache-2.0
"""Inputs of recomputed layers on the host from forward to backward (`recompute_granularity: offload`).

Full recomputation keeps one tensor per layer and microbatch, the layer's input. Here it waits in page-locked memory.
megatron-core's own offloading needs Transformer Engine, or replaces recomputation and refuses pipelines; this needs
hooks of autograd alone, and the same code runs on a CPU. Copies are queued on the stream of the computation: blocks are
thus reused without a wait, and the host continues at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from torch.autograd.graph import saved_tensors_hooks
from torch.cuda._pin_memory_utils import pin_memory


class _Held:
    """A tensor on the host, in a block that returns to its owner with this object."""

    def __init__(self, tensor: torch.Tensor, block: torch.Tensor) -> None:
        self._device = tensor.device
        self._values = block[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._values.copy_(tensor.detach(), non_blocking=True)

    def load(self) -> torch.Tensor:
        """Return a copy on the device, asynchronously to the host."""
        return self._values.to(self._device, non_blocking=True, copy=True)


class InputStore:
    """Host memory of the inputs of a model's layers, in blocks of `rows` hidden states, a full microbatch."""

    def __init__(self, hidden_size: int, rows: int) -> None:
        self._hidden_size, self._rows = hidden_size, rows
        self._free: list[torch.Tensor] = []
        self._open: list[Any] = []
        self.num_bytes = self.num_stored = 0  # inputs that are on the host now

    def watch(self, stages: Iterable[torch.nn.Module]) -> None:
        """Store the inputs of the layers of these stages from now on."""
        for stage in stages:
            for block in (x for x in stage.modules() if isinstance(x, TransformerBlock)):
                block.register_forward_pre_hook(self._begin)
                if isinstance(block.final_layernorm, torch.nn.Module):  # what it saves is not an input of a layer
                    block.final_layernorm.register_forward_pre_hook(self._end)
                block.register_forward_hook(self._end, always_call=True)

    def _begin(self, *unused: Any) -> None:
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._open.append(hooks)

    def _end(self, *unused: Any) -> None:
        if self._open:
            self._open.pop().__exit__()

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.dim() != 3 or tensor.shape[-1] != self._hidden_size:  # no hidden states [t, 1, h]
            return tensor
        block = next((x for x in self._free if len(x) >= tensor.nbytes), None)
        if block is None:
            full = self._rows * self._hidden_size * tensor.itemsize
            block = torch.empty(max(full, tensor.nbytes), dtype=torch.uint8)
            self.num_bytes += len(block)
            if tensor.is_cuda:
                pin_memory(block.data_ptr(), len(block))
        else:
            self._free = [x for x in self._free if x is not block]
        held = _Held(tensor, block)
        self.num_stored += 1
        weakref.finalize(held, self._give_back, block).atexit = False
        return held

    def _give_back(self, block: torch.Tensor) -> None:
        self._free.append(block)
        self.num_stored -= 1

    def _unpack(self, packed: Any) -> torch.Tensor:
        return packed.load() if isinstance(packed, _Held) else packed
