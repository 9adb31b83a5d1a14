# SPDX-License-Identifier: Apache-2.0
"""The experts of a rank: one parameter for all gates and ups [E, 2 f, h] and one for all downs [E, h, f].

One `grouped_mm` multiplies all rows, sorted by expert. Experts are multiplied one by one if a matrix dimension is not a
multiple of 16 bytes, for batch invariance, and for quantized weights. Outside the model each expert has its own
matrices (`weights/packed_experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch.autograd.function import once_differentiable

from megatron_rl.models.lora_linears import (
    AdaptedLinear,
    AdaptedMatrix,
    LinearAdapter,
    find_adapter,
    multiply_quantized,
)
from megatron_rl.models.stages import GatedActivation, make_parameter
from megatron_rl.parallel.batch_invariant import multiply as multiply_padded
from megatron_rl.weights.adapters import AdapterShape
from megatron_rl.weights.packed_experts import ROW_BYTES, name_expert, split_experts
from megatron_rl.weights.quantization import QuantizedMatrix

_SIGMOID_GAIN = 1.702


class RowCounts:
    """Number of rows per expert, on the host or the device as needed.

    Args:
        counts: [E]; on the host under expert parallelism.
        rows: [t, k], sorted by expert.
    """

    def __init__(self, counts: Any, rows: torch.Tensor) -> None:
        self._counts, self._device = torch.as_tensor(counts), rows.device
        self.num_experts, self.num_rows = len(self._counts), len(rows)
        self.is_on_device = self._counts.device == rows.device

    @cached_property
    def on_host(self) -> list[int]:
        """Rows per expert as a list; may wait for the device, which a CUDA graph cannot capture."""
        return self._counts.tolist()

    @cached_property
    def ends(self) -> torch.Tensor:
        """[E] int32 on the device of the rows: exclusive end row of each expert."""
        return self._counts.cumsum(0, dtype=torch.int32).to(self._device, non_blocking=True)

    @cached_property
    def experts(self) -> torch.Tensor:
        """[t] expert of each row."""
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self._device)
        return torch.searchsorted(self.ends, rows, right=True)


class GroupedLinear(AdaptedLinear):
    """Linear layer of every expert of a rank, optionally with adapters.

    Args:
        size: [E, n, k] on this rank: E experts that map k channels to n.
        split_dim: the dimension of `size` that is split over expert tensor parallel ranks.
        batch_invariant: make the output bits of a row independent of its expert's other rows.
        adapter: LoRA of every expert, for p parts of the weight: A [E, p r, k] and B [E, rows of the parts, r], split
            over TP like the weight.
    """

    weight: Any  # [E, n, k], or E matrices in NF4

    def __init__(
        self,
        size: tuple[int, int, int],
        config: TransformerConfig,
        groups: Any,
        *,
        split_dim: int,
        batch_invariant: bool,
        adapter: LinearAdapter | None,
        is_quantized: bool,
    ) -> None:
        super().__init__()
        tp_size = groups.expt_tp.size()
        self._marks = dict(allreduce=groups.ep.size() == 1 and tp_size == groups.tp.size())
        self._has_copies = tp_size > 1
        weight = self._make(config, torch.empty, size, split_dim)
        self.weight = [QuantizedMatrix(matrix) for matrix in weight.unbind()] if is_quantized else weight
        of_rows, of_columns = (1, None) if split_dim == 1 else (None, 2)
        # [E, n], added by `GroupedExperts`, or `None`.
        self.bias = self._make(config, torch.zeros, size[:2], of_rows) if config.add_bias_linear else None
        self._multiply: Callable[[torch.Tensor, torch.Tensor, RowCounts], torch.Tensor] = (
            partial(multiply_in_turn, multiply_padded) if batch_invariant else multiply
        )
        self._parts = adapter
        if adapter is not None:
            (num_experts, _, k), r = size, adapter.rank
            self.lora_A = self._make(config, torch.zeros, (num_experts, len(adapter.parts) * r, k), of_columns)
            self.lora_B = self._make(config, torch.zeros, (num_experts, sum(adapter.lengths), r), of_rows)

    def list_matrices(self, name: str) -> dict[str, AdaptedMatrix]:
        """Return each expert's weight with its adapters, none without adapters; `name`: the layer's in the model."""
        if (adapter := self._parts) is None:
            return {}
        matrices = zip(self.weight, self.lora_A.data, self.lora_B.data, strict=True)
        return {
            name_expert(f"{name}.weight", expert): (
                weight,
                list(zip(adapter.parts, a.split(adapter.rank), b.split(adapter.lengths), strict=True)),
            )
            for expert, (weight, a, b) in enumerate(matrices)
        }

    def forward(self, x: torch.Tensor, counts: RowCounts) -> torch.Tensor:
        """Map rows [t, k], sorted by expert, to [t, n]."""
        if isinstance(self.weight, list):
            output = multiply_in_turn(multiply_quantized, x, self.weight, counts)
        else:
            output = self._multiply(x, self.weight, counts)
        if (adapter := self._parts) is None or not self._is_on:
            return output
        inner = self._multiply(x, self.lora_A, counts)
        halves = zip(inner.split(adapter.rank, -1), self.lora_B.split(adapter.lengths, 1), strict=True)
        changes = [self._multiply(z.contiguous(), b.contiguous(), counts) for z, b in halves]
        return output + adapter.join(changes, output.shape[-1])

    def _make(
        self, config: TransformerConfig, fill: Callable[..., torch.Tensor], size: tuple[int, ...], split_dim: int | None
    ) -> torch.nn.Parameter:
        """Make a parameter of experts; `split_dim`: dimension split over expert TP, `None` for a replica."""
        if split_dim is None and not self._has_copies:
            split_dim = -1  # not split, and another one on each TP rank
        parameter = make_parameter(config, fill, *size, split_dim=split_dim)
        vars(parameter).update(self._marks)
        return parameter


class ClampedActivation(torch.nn.Module):
    """Activation of gpt-oss: gate and up are clamped; the result is gate * sigmoid(1.702 gate) * (up + 1)."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit

    def forward(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        """Map [t, ..., 2 f], gate then up, to [t, ..., f]."""
        return _ClampedActivation.apply(gate_and_up, self._limit)


class _ClampedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.save_for_backward(gate_and_up)
        ctx.limit = limit
        gate, up = gate_and_up.chunk(2, -1)
        gate = gate.clamp(max=limit)
        return (gate * _SIGMOID_GAIN).sigmoid_().mul_(gate).mul_(up.clamp(-limit, limit) + 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gate_and_up,) = ctx.saved_tensors
        (whole_gate, whole_up), limit = gate_and_up.chunk(2, -1), ctx.limit
        gate, up = whole_gate.clamp(max=limit), whole_up.clamp(-limit, limit)
        share = (gate * _SIGMOID_GAIN).sigmoid_()
        slope = share * (1 + _SIGMOID_GAIN * gate * (1 - share))
        of_gate = (gradient * (up + 1) * slope).mul_(whole_gate <= limit)
        of_up = (gradient * gate * share).mul_(whole_up.abs() <= limit)
        return torch.cat([of_gate, of_up], -1), None


class GroupedExperts(torch.nn.ModuleDict):
    """The experts of a rank, [t, h] -> [t, h], with megatron-core's signature.

    Args:
        submodules, name: unused.
        batch_invariant: whether a row's bits are independent of its expert's other rows.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: Any = None,
        *,
        pg_collection: Any,
        name: str | None = None,
        batch_invariant: bool = False,
        adapters: AdapterShape | None = None,
    ) -> None:
        super().__init__()
        assert config.moe_ffn_hidden_size is not None, "experts have columns"
        f, h = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.hidden_size
        for name, size, split_dim, parts in (
            ("linear_fc1", (num_local_experts, 2 * f, h), 1, {"gate": f, "up": f}),
            ("linear_fc2", (num_local_experts, h, f), 2, {"down": h}),
        ):
            self[name] = GroupedLinear(
                size,
                config,
                pg_collection,
                split_dim=split_dim,
                batch_invariant=batch_invariant,
                adapter=adapters and find_adapter(adapters, parts),
                is_quantized=adapters is not None and adapters.is_quantized,
            )
        limit = config.activation_func_clamp_value
        self["activation"] = GatedActivation(config) if limit is None else ClampedActivation(limit)
        self._adds_bias = pg_collection.expt_tp.rank() == 0  # results are summed over TP: add it once

    def forward(self, x: torch.Tensor, tokens_per_expert: Any, shares: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Apply the experts to rows sorted by expert; routing weights `shares` [t] scale results and biases."""
        first: Any = self["linear_fc1"]
        second: Any = self["linear_fc2"]
        counts = RowCounts(tokens_per_expert, x)
        inner = first(x, counts)
        if first.bias is not None:
            inner = inner + first.bias[counts.experts]
        inner = self["activation"](inner)
        output = second((inner * shares.unsqueeze(-1)).to(inner.dtype), counts)
        if second.bias is not None:
            added = second.bias[counts.experts] * shares.unsqueeze(-1)
            output = output + (added if self._adds_bias else added * 0.0).to(output.dtype)
        return output, None


def list_matrices(
    stages: torch.nn.Module, read: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor | QuantizedMatrix]:
    """Map names to `read(parameter)` of all parameters, and to NF4 matrices; each expert has entries of its own."""
    found: dict[str, torch.Tensor | QuantizedMatrix] = {}
    found |= split_experts({name: read(parameter) for name, parameter in stages.named_parameters()}, name_expert)
    for name, module in stages.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(weight, QuantizedMatrix):
            found[f"{name}.weight"] = weight
        elif isinstance(weight, list):  # of experts
            found |= {name_expert(f"{name}.weight", expert): matrix for expert, matrix in enumerate(weight)}
    return found


def multiply(x: torch.Tensor, weight: torch.Tensor, counts: RowCounts) -> torch.Tensor:
    """Multiply rows [t, k], sorted by expert, with their experts' matrices of [E, n, k]: [t, n]."""
    _, n, k = weight.shape
    if not len(x) or n * weight.itemsize % ROW_BYTES or k * weight.itemsize % ROW_BYTES:
        return multiply_in_turn(F.linear, x, weight, counts)
    return _Product.apply(x, weight, counts.ends)


def multiply_in_turn(
    product: Callable[..., torch.Tensor], x: torch.Tensor, weight: Any, counts: RowCounts
) -> torch.Tensor:
    """Multiply rows [t, k] with their experts' matrices, one after the other, by `product`: [t, n]."""
    return torch.cat([product(rows, matrix) for rows, matrix in zip(x.split(counts.on_host), weight, strict=True)])


class _Product(torch.autograd.Function):
    """`grouped_mm` with a gradient for non-contiguous rows, which torch's own lacks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, ends)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        gradient = gradient.contiguous()
        of_x = F.grouped_mm(gradient, weight, offs=ends) if wants_x else None
        of_weight = F.grouped_mm(gradient.t(), x, offs=ends) if wants_weight else None
        return of_x, of_weight, None
