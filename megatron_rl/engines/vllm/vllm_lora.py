# SPDX-License-Identifier: Apache-2.0
"""The policy's adapters in vLLM's own buffers, written in place.

vLLM loads adapters from files into slots. Here the one slot gets an adapter without matrices, which leaves zeros, and
the reshard writes the buffers. B contains the scale.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.weights.adapters import AdapterShape
from megatron_rl.weights.support import LARGEST_RANK

_RANKS = (8, 16, 32, 64, 128, 256, 320, LARGEST_RANK)  # buffer sizes of vLLM
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def list_arguments(shape: AdapterShape) -> dict[str, Any]:
    """Return the arguments of an engine with one slot."""
    rank = next(size for size in _RANKS if size >= shape.rank)
    return dict(enable_lora=True, max_loras=1, max_cpu_loras=1, max_lora_rank=rank, lora_target_modules=shape.modules)


def take_slot(worker: Any, adapters: Any) -> None:
    """Activate the slot for the policy's adapters, which have no matrices."""
    manager = worker.model_runner.lora_manager._adapter_manager
    manager._registered_adapters[adapters.id] = adapters  # `add_adapter` refuses adapters without matrices
    manager.activate_adapter(adapters.id)


def list_adapter_params(model: torch.nn.Module, shape: AdapterShape) -> dict[str, torch.Tensor]:
    """Return the slot's buffers, `<matrix>.lora_A` [R, in] and `<matrix>.lora_B` [out, R] with R >= the rank."""
    found, modules = {}, set(shape.modules)
    named: Any = model.named_modules()
    for name, module in named:
        if not hasattr(module, "lora_a_stacked"):
            continue
        owner, _, last = name.rpartition(".")
        for part, a, b in zip(_PARTS.get(last, (last,)), module.lora_a_stacked, module.lora_b_stacked, strict=True):
            if part in modules:
                found |= {f"{owner}.{part}.lora_A": a[0, 0], f"{owner}.{part}.lora_B": b[0, 0]}
    return found
