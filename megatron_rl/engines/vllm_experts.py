# SPDX-License-Identifier: Apache-2.0
"""Experts that vLLM's CPU kernels want in an order of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def find_packed_experts(model: torch.nn.Module, device: torch.device) -> list[tuple[torch.Tensor, str]]:
    """Fused expert weights with the instruction set that vLLM's CPU kernel wants them packed for."""
    if device.type != "cpu":
        return []
    packed = []
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "w13_weight"):
            experts = module.quant_method.moe_kernel.fused_experts
            if not experts._use_zentorch:  # that kernel takes them as they are
                packed += [(param.data, experts.isa) for param in (module.w13_weight, module.w2_weight)]
    return packed
