# SPDX-License-Identifier: Apache-2.0
"""RMS norms (arXiv 1910.07467) for Megatron's sequence parallelism, and over TP-split channels.

Layers can normalize the outputs of attention and MLP, besides inputs (Gemma 3, GLM-4) or only outputs (OLMo 2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.autograd.function import once_differentiable

from megatron_rl.models.stages import make_parameter


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


class SplitRMSNorm(torch.nn.Module):
    """RMS norm over `size` channels that are split over TP, like its weight; the weight's gradient is complete."""

    def __init__(
        self, config: TransformerConfig, size: int, eps: float, tp_group: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__()
        self.eps, self._size, self._tp_group = eps, size, tp_group
        self.weight = make_parameter(config, torch.ones, size // tp_group.size(), split_dim=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize [..., size/tp] in float32; all ranks must pass the same rows."""
        wide = x.float()
        squares = reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True), self._tp_group)
        squares = copy_to_tensor_model_parallel_region(squares, self._tp_group)  # sums the gradient over TP
        return (wide * (squares / self._size + self.eps).rsqrt() * self.weight.float()).type_as(x)


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


class SandwichLayer(TransformerLayer):
    """megatron-core layer that also normalizes the outputs of attention and MLP."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        config = self.config
        norm: Any = self.submodules_config.input_layernorm
        self.post_self_attn_layernorm, self.post_mlp_layernorm = (
            build_module(norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
            for _ in range(2)
        )
        self.self_attn_bda = _add_normalized(self.post_self_attn_layernorm)
        self.mlp_bda = _add_normalized(self.post_mlp_layernorm)


class OutputNormLayer(SandwichLayer):
    """megatron-core layer that normalizes the outputs of attention and MLP, not their inputs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name in ("input_layernorm", "pre_mlp_layernorm"):
            self.add_module(name, IdentityOp())


def _add_normalized(norm: Any) -> Callable[..., Callable[..., torch.Tensor]]:
    """Return a replacement for megatron-core's bias-dropout-add that normalizes the output before the sum."""

    def add(result: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
        output, bias = result
        assert bias is None and dropout == 0.0, "matrices without a bias, and no dropout"
        return residual + norm(output)

    return lambda is_training, fused: add
