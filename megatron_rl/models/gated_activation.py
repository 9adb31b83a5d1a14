# SPDX-License-Identifier: Apache-2.0
"""SwiGLU and its relative with GELU (arXiv 2002.05202) as one step of autograd, which keeps nothing but its input.

Written out as activation(gate) * up, autograd would keep the activated gate as well. The bits are the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch.autograd.function import once_differentiable


class GatedActivation(torch.nn.Module):
    """[t, ..., 2 f] of gate and up, in this order, -> activation(gate) * up, [t, ..., f]; megatron-core's signature.

    The activation is SiLU, or where the config says GELU its tanh form.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._is_gelu = config.activation_func is F.gelu

    def forward(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        """Activate."""
        return _GatedActivation.apply(gate_and_up, self._is_gelu)


def _activate(gate: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
        ctx.save_for_backward(gate_and_up)
        ctx.is_gelu = is_gelu
        gate, up = gate_and_up.chunk(2, -1)
        return _activate(gate, is_gelu).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gate_and_up,) = ctx.saved_tensors
        result = torch.empty_like(gate_and_up)
        (gate, up), (of_gate, of_up) = gate_and_up.chunk(2, -1), result.chunk(2, -1)
        torch.mul(gradient, _activate(gate, ctx.is_gelu), out=of_up)
        if ctx.is_gelu:
            torch.ops.aten.gelu_backward(gradient * up, gate, approximate="tanh", grad_input=of_gate)
        else:
            torch.ops.aten.silu_backward(gradient * up, gate, grad_input=of_gate)
        return result, None
