# SPDX-License-Identifier: Apache-2.0
"""RMS norm (arXiv 1910.07467), SwiGLU and GEGLU (arXiv 2002.05202): eager bits, and less saved for backward.

A GPU computes SwiGLU by a Triton kernel, with another exponential.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch.autograd.function import once_differentiable

from megatron_rl.models.stages import make_parameter
from megatron_rl.parallel.kernels import choose_triton_kernels


class RMSNorm(torch.nn.Module):
    """RMS norm; Megatron sums the weight's partial gradients of the TP ranks under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps, self.is_zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = make_parameter(config, torch.ones, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension; a zero-centered weight applies in float32, before rounding."""
        if self.is_zero_centered:
            return _normalize(x.float(), 1 + self.weight.float(), self.eps).type_as(x)
        return _normalize(x, self.weight, self.eps)


def _normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize bitwise as torch does; in float32 on CPU by `_Norm`, since torch would save intermediates."""
    if x.is_cuda or x.dtype != torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return _Norm.apply(x, x, weight, eps)  # `x` twice: autograd adds its gradient's terms in torch's order


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, again: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        factor = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()  # [t, ..., 1]
        ctx.save_for_backward(x, weight, factor)
        return (x * factor).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        x, weight, factor = ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[2]:
            of_weight = (gradient * (x * factor)).sum(tuple(range(x.ndim - 1)))
        scaled = gradient * weight
        of_factor = (scaled * x).sum(-1, keepdim=True)
        of_mean = -0.5 * of_factor * factor.pow(3) / x.shape[-1]
        return scaled.mul_(factor), x * (2 * of_mean), of_weight, None


class GatedActivation(torch.nn.Module):
    """Module that maps [t, ..., 2 f], gate then up, to activation(gate) * up, [t, ..., f], with SiLU or tanh-GELU."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._is_gelu = config.activation_func is F.gelu

    def forward(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        """Apply the activation."""
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
