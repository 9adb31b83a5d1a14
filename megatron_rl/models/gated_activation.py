# SPDX-License-Identifier: Apache-2.0
"""SwiGLU and GEGLU (arXiv 2002.05202) as one autograd function that saves only its input.

Bits equal eager code, except that a GPU computes SwiGLU by a Triton kernel, with another exponential.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch.autograd.function import once_differentiable

from megatron_rl.parallel.kernels import choose_triton_kernels

_SIGMOID_GAIN = 1.702


class GatedActivation(torch.nn.Module):
    """Module that maps [t, ..., 2 f], gate then up, to activation(gate) * up, [t, ..., f], with SiLU or tanh-GELU.

    With a clamp value (gpt-oss), gate and up are clamped; the result is gate * sigmoid(1.702 gate) * (up + 1).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._is_gelu, self._limit = config.activation_func is F.gelu, config.activation_func_clamp_value

    def forward(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        """Apply the activation."""
        if self._limit is not None:
            return _ClampedActivation.apply(gate_and_up, self._limit)
        return _GatedActivation.apply(gate_and_up, self._is_gelu)


def _activate(gate: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)


def _choose_kernels(gate_and_up: torch.Tensor, is_gelu: bool) -> ModuleType | None:
    return None if is_gelu or not gate_and_up.is_contiguous() else choose_triton_kernels(gate_and_up)


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
        ctx.save_for_backward(gate_and_up)
        ctx.is_gelu = is_gelu
        kernels = _choose_kernels(gate_and_up, is_gelu)
        if kernels is not None:
            return kernels.apply_swiglu(gate_and_up)
        gate, up = gate_and_up.chunk(2, -1)
        return _activate(gate, is_gelu).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gate_and_up,) = ctx.saved_tensors
        kernels = _choose_kernels(gate_and_up, ctx.is_gelu)
        if kernels is not None:
            return kernels.differentiate_swiglu(gate_and_up, gradient.contiguous()), None
        result = torch.empty_like(gate_and_up)
        (gate, up), (of_gate, of_up) = gate_and_up.chunk(2, -1), result.chunk(2, -1)
        torch.mul(gradient, _activate(gate, ctx.is_gelu), out=of_up)
        if ctx.is_gelu:
            torch.ops.aten.gelu_backward(gradient * up, gate, approximate="tanh", grad_input=of_gate)
        else:
            torch.ops.aten.silu_backward(gradient * up, gate, grad_input=of_gate)
        return result, None


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
