# SPDX-License-Identifier: Apache-2.0
"""Linear layers with low-rank adapters, y = W x + s B A x (LoRA, 2106.09685), and with a frozen NF4 weight (QLoRA).

Adapters are parameters of the linear itself (layout: `weights/adapters.py`). TP ranks exchange only the r numbers per
token between A and B. For adapters of experts see `experts.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch.autograd.function import once_differentiable

from megatron_rl.models.stages import gather_for_shards, make_parameter
from megatron_rl.weights.adapters import AdapterShape
from megatron_rl.weights.quantization import QuantizedMatrix

HALVES = ("lora_A", "lora_B")


@dataclass(frozen=True)
class LinearAdapter:
    """LoRA settings of one linear on a TP rank; `parts`: rows [start, stop) of its weight that each adapter changes."""

    rank: int
    scale: torch.Tensor
    parts: tuple[tuple[int, int], ...]

    @property
    def lengths(self) -> list[int]:
        """Number of rows of each part."""
        return [stop - start for start, stop in self.parts]

    def join(self, changes: list[torch.Tensor], width: int) -> torch.Tensor:
        """Return [..., width]: each adapter's change [..., rows of its part], scaled, in its place; zeros elsewhere."""
        pieces, end = [], 0
        for (start, stop), change in zip(self.parts, changes, strict=True):
            if start > end:
                pieces.append(change.new_zeros(*change.shape[:-1], start - end))
            pieces.append(change)
            end = stop
        if end < width:
            pieces.append(changes[0].new_zeros(*changes[0].shape[:-1], width - end))
        return self.scale * (pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1))


# A matrix of a linear on a TP rank, and of each of its adapters the changed rows [start, stop), A, and B.
AdaptedMatrix = tuple[torch.Tensor | QuantizedMatrix, list[tuple[tuple[int, int], torch.Tensor, torch.Tensor]]]


class AdaptedLinear(torch.nn.Module):
    """Linear with LoRA adapters that can be switched off."""

    weight: torch.Tensor | QuantizedMatrix
    lora_A: torch.Tensor
    lora_B: torch.Tensor
    _adapter: LinearAdapter
    _is_on = True

    def list_matrices(self, name: str) -> dict[str, AdaptedMatrix]:
        """Return this linear's weight and its adapters, by the weight's name; `name`: the linear's in the model."""
        adapter = self._adapter
        a, b = self.lora_A.data.split(adapter.rank), self.lora_B.data.split(adapter.lengths)
        return {f"{name}.weight": (self.weight, list(zip(adapter.parts, a, b, strict=True)))}

    def use_adapter(self, is_on: bool) -> None:
        """Switch the adapters on or off."""
        self._is_on = is_on


class LoraColumnParallelLinear(AdaptedLinear, ColumnParallelLinear):
    """Column-parallel linear with stacked A [n r, h], replicated over TP, and B [rows, r], split like W."""

    def __init__(self, *arguments: Any, adapter: LinearAdapter, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._adapter = adapter
        config, rank = self.config, adapter.rank
        self.lora_A = make_parameter(config, torch.zeros, len(adapter.parts) * rank, self.weight.shape[1])
        self.lora_B = make_parameter(config, torch.zeros, sum(adapter.lengths), rank, split_dim=0)

    def forward(self, input_: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        """Map [t, 1, h], or [t/tp, 1, h] under sequence parallelism, to [t, 1, rows]."""
        output, bias = super().forward(input_, *arguments, **options)
        if not self._is_on:
            return output, bias
        group: Any = self.tp_group
        inner = F.linear(input_, self.lora_A)  # [t or t/tp, 1, n r]
        inner = gather_for_shards(inner, sequence_parallel=self.config.sequence_parallel, tp_group=group)
        halves = zip(inner.split(self._adapter.rank, -1), self.lora_B.split(self._adapter.lengths), strict=True)
        return output + self._adapter.join([F.linear(z, b) for z, b in halves], output.shape[-1]), bias


class LoraRowParallelLinear(AdaptedLinear, RowParallelLinear):
    """Row-parallel linear with A [r, in/tp], split like W, and B [out, r], replicated over TP."""

    def __init__(self, *arguments: Any, adapter: LinearAdapter, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._adapter = adapter
        self.lora_A = make_parameter(self.config, torch.zeros, adapter.rank, self.weight.shape[1], split_dim=1)
        self.lora_B = make_parameter(self.config, torch.zeros, self.weight.shape[0], adapter.rank)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Map [t, 1, in/tp] to [t, 1, out], or [t/tp, 1, out] under sequence parallelism."""
        output, bias = super().forward(input_)
        if not self._is_on:
            return output, bias
        inner = F.linear(input_, self.lora_A)  # of this rank's columns
        if self.config.sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.tp_group)
        else:
            inner = reduce_from_tensor_model_parallel_region(inner, group=self.tp_group)
        return output + self._adapter.scale * F.linear(inner, self.lora_B), bias


def find_adapter(shape: AdapterShape, parts: dict[str, int]) -> LinearAdapter | None:
    """Return the adapter configuration of a linear, `None` if none of its matrices is adapted.

    Args:
        parts: kind of each matrix fused in the weight, in order, to its rows on a TP rank.
    """
    ends, served = 0, []
    for kind, rows in parts.items():
        if kind in shape.kinds:
            served.append((ends, ends + rows))
        ends += rows
    return LinearAdapter(shape.rank, shape.live_scale, tuple(served)) if served else None


def freeze_model(stages: torch.nn.Module) -> None:
    """Freeze all parameters but adapters and score head; embedding outputs require a gradient, for recomputation."""
    for name, parameter in stages.named_parameters():
        parameter.requires_grad_(is_trained(name))
    for name, module in stages.named_modules():
        if name.endswith("embedding"):
            module.register_forward_hook(
                lambda _, inputs, output: output.requires_grad_() if torch.is_grad_enabled() else output
            )


def is_trained(name: str) -> bool:
    """Return whether a parameter of a model with adapters is trained: an adapter, or the score head."""
    return name.endswith((*HALVES, "score.weight"))


@contextmanager
def without_adapters(stages: torch.nn.Module) -> Iterator[None]:
    """Switch all adapters off inside the block."""
    linears = [module for module in stages.modules() if isinstance(module, AdaptedLinear)]
    for linear in linears:
        linear.use_adapter(False)
    try:
        yield
    finally:
        for linear in linears:
            linear.use_adapter(True)


def adapt_layer(config: TransformerConfig, adapters: AdapterShape, attention: Any, mlp: Any) -> None:
    """Replace the linears in a layer's submodule specs with adapted or NF4 ones in place; `mlp`: `None` for experts."""
    shape, tp_size = adapters.base, config.tensor_model_parallel_size
    q, kv, ffn = (
        size // tp_size
        for size in (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.ffn_hidden_size)
    )
    linears = [
        (attention, "linear_qkv", {"q.weight": q, "k.weight": kv, "v.weight": kv}),
        (attention, "linear_proj", {"o": shape.hidden_size}),
    ]
    if mlp is not None:
        linears += [(mlp, "linear_fc1", {"gate": ffn, "up": ffn}), (mlp, "linear_fc2", {"down": shape.hidden_size})]
    for part, name, rows in linears:
        linear, params = getattr(part, name), {}
        if (adapter := find_adapter(adapters, rows)) is not None:
            linear = LoraRowParallelLinear if name in ("linear_proj", "linear_fc2") else LoraColumnParallelLinear
            params = {"adapter": adapter}
        if adapters.is_quantized:
            linear = _quantize(linear)
        vars(part)[name] = ModuleSpec(module=linear, params=params)


@cache
def _quantize(linear: type) -> type:
    return type(f"Quantized{linear.__name__}", (QuantizedLinear, linear), {})


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
        output = multiply_quantized(input, weight, tp_group if allreduce_dgrad else None)
        return output if bias is None else output + bias


def multiply_quantized(
    x: torch.Tensor, weight: QuantizedMatrix, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return x W^T; the weight is dequantized again in the backward, which sums the gradient of x over `group`."""
    return _QuantizedProduct.apply(x, weight, group)


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: QuantizedMatrix, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.weight, ctx.group = weight, group
        return torch.matmul(x, weight[:].t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        found = gradient.matmul(ctx.weight[:])
        if ctx.group is not None:
            dist.all_reduce(found, group=ctx.group)
        return found, None, None
