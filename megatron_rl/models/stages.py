# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages of a model, a subclass of megatron-core's GPTModel that ends in hidden states; norm and activation.

Hidden states are `[t, 1, h]`, equal on all TP ranks, or `[t/tp, 1, h]` under sequence parallelism. The output layer is
split over TP: `gather_for_shards` sums the ranks' partial gradients of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import ModelParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from megatron_rl.parallel.collectives import choose_triton_kernels, current_device


def gather_for_shards(x: torch.Tensor, *, sequence_parallel: bool, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Map [t, 1, h], or [t/tp, 1, h] with `sequence_parallel`, to [t, 1, h] for matrices that are split over TP.

    The backward sums the gradients of the TP ranks.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=tp_group)
    return copy_to_tensor_model_parallel_region(x, group=tp_group)


def combine_shards(values: torch.Tensor, index: torch.Tensor, length: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Combine the values of all ranks into the whole row, [t, ...]; differentiable, collective.

    All ranks must compute the same loss from the result: each receives only its own values' gradient, so the group's
    sum of parameter gradients is the loss's gradient.

    Args:
        values: [k, ...] of this rank.
        index: [k] int64, their positions; disjoint between ranks.
        length: t; positions that no rank fills are 0.
    """
    combined = values.new_zeros(length, *values.shape[1:]).index_copy(0, index, values)
    # Works for any group: sums forward, identity backward.
    return reduce_from_tensor_model_parallel_region(combined, group=group)


def make_parameter(
    config: ModelParallelConfig, fill: Callable[..., torch.Tensor], *size: int, split_dim: int | None = None
) -> torch.nn.Parameter:
    """Make a parameter with the attributes that megatron-core's optimizer and TP read.

    Args:
        split_dim: dimension split over TP; replicated if `None`: only TP rank 0's gradient counts in the global norm,
            and under sequence parallelism megatron-core sums the ranks' partial gradients. -1: not split, but another
            parameter on each TP rank.
    """
    parameter = torch.nn.Parameter(fill(size, dtype=config.params_dtype, device=current_device()))
    is_split = split_dim is not None
    set_tensor_model_parallel_attributes(parameter, is_parallel=is_split, dim=split_dim if is_split else -1, stride=1)
    vars(parameter)["sequence_parallel"] = config.sequence_parallel and not is_split
    return parameter


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter's or gradient's values on this rank: the tensor, or the local shard of a DTensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class HiddenStatesModel(GPTModel):
    """GPTModel whose last stage returns final hidden states: [t, 1, h], or [t/tp, 1, h] under sequence parallelism."""

    def _is_in_embd_group(self) -> bool:
        """Return False to skip the initial all-reduce of tied embeddings: both stages load equal weights."""
        return False

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states

    @property
    def output_weight(self) -> torch.Tensor:
        """Rows [v/tp, h] of the output layer (the embedding if tied) on this rank; last stage only."""
        is_tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        assert isinstance(weight, torch.nn.Parameter), "the last stage has an output layer"
        return weight


class RMSNorm(torch.nn.Module):
    """RMS norm (1910.07467); Megatron sums the weight's partial gradients of TP ranks under sequence parallelism."""

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
    """Module that maps [t, ..., 2 f], gate then up, to activation(gate) * up, [t, ..., f] (arXiv 2002.05202).

    The activation is SiLU, by a Triton kernel with another exponential on a GPU, or tanh-GELU.
    """

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
