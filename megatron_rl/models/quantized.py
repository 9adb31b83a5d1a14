# SPDX-License-Identifier: Apache-2.0
"""Linear layers with a frozen NF4 weight (QLoRA, 2305.14314), with or without adapters.

The weight is dequantized in the forward and again in the backward, so no dequantized copy is kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.autograd.function import once_differentiable

from megatron_rl.weights.fused_experts import name_expert
from megatron_rl.weights.nf4 import QuantizedMatrix


class QuantizedLinear(torch.nn.Module):
    """Mixin before a megatron-core linear: the weight is a `QuantizedMatrix` (zeros at first), not a parameter."""

    weight: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        weight = self.weight
        del self.weight
        self.weight = QuantizedMatrix(weight)

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: QuantizedMatrix,
        bias: torch.Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        **_: Any,
    ) -> torch.Tensor:
        """Compute the product, called by megatron-core in place of `linear_with_frozen_weight`."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        output = _Product.apply(input, weight, tp_group if allreduce_dgrad else None)
        return output if bias is None else output + bias


def list_quantized_linears(stages: torch.nn.Module) -> dict[str, QuantizedMatrix]:
    """Return the NF4 weights of a model by the names they would have as parameters."""
    weights = {f"{name}.weight": getattr(module, "weight", None) for name, module in stages.named_modules()}
    found = {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedMatrix)}
    for name, weight in weights.items():  # of experts
        if isinstance(weight, list):
            found |= {name_expert(name, expert): matrix for expert, matrix in enumerate(weight)}
    return found


def multiply_quantized(x: torch.Tensor, weight: QuantizedMatrix) -> torch.Tensor:
    """Return x W^T."""
    return _Product.apply(x, weight, None)


class _Product(torch.autograd.Function):
    """x W^T with an optional all-reduce in the backward, in megatron-core's order of operations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: QuantizedMatrix, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.weight, ctx.group = weight, group
        return torch.matmul(x, weight.dequantize().t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        found = gradient.matmul(ctx.weight.dequantize())
        if ctx.group is not None:
            dist.all_reduce(found, group=ctx.group)
        return found, None, None
