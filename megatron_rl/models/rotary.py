# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding from explicit positions (RoFormer, arXiv 2104.09864, equation 34).

megatron-core rotates by row, which contiguous context parallel shards and shared prompts do not allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron_rl.parallel.kernels import choose_triton_kernels

if TYPE_CHECKING:
    from megatron_rl.weights.rope import RopeScaling


class RotaryTable(NamedTuple):
    """Cosine and sine [t, 1, d] of each position; `neighbors`: rotated pairs are adjacent channels, not d/2 apart."""

    cosine: torch.Tensor
    sine: torch.Tensor
    neighbors: bool


def compute_rotary_table(
    position_ids: torch.Tensor,
    *,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
    neighbors: bool = False,
) -> RotaryTable:
    """Compute the rotary table of each position.

    Args:
        position_ids: [t] int64.
        head_dim: d, even.
        theta: base of the frequencies theta^(-2i/d).
        dtype: of the table; angles are computed in float32, as in transformers.
        neighbors: whether pairs are adjacent channels (GLM-4, DeepSeek-V3) or d/2 apart (Llama).

    Returns:
        Cosine and sine, [t, 1, d]; the first sine of a pair is negated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=position_ids.device).float() / head_dim
    periods = theta**exponents
    frequencies, growth = 1.0 / periods, 1.0
    if scaling is not None:
        from megatron_rl.weights.rope import scale_frequencies

        frequencies, growth = scale_frequencies(periods, theta, scaling)
    angles = torch.outer(position_ids.float(), frequencies)[:, None]  # [t, 1, d/2]
    cosine, sine = ((x if growth == 1.0 else x * growth).to(dtype) for x in (angles.cos(), angles.sin()))
    if neighbors:
        return RotaryTable(cosine.repeat_interleave(2, -1), torch.stack([-sine, sine], -1).flatten(-2), True)
    return RotaryTable(torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1), False)


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, neighbors: bool) -> torch.Tensor:
    """Rotate the first d channels of [t, heads, ...] by a `RotaryTable` of width d."""
    width = cosine.shape[-1]
    if width == heads.shape[-1]:
        return _Rotation.apply(heads, cosine, sine, neighbors)
    return torch.cat([_Rotation.apply(heads[..., :width], cosine, sine, neighbors), heads[..., width:]], -1)


class _Rotation(torch.autograd.Function):
    """Rotation whose backward rotates by the negative angle."""

    @staticmethod
    def forward(
        ctx: Any, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, neighbors: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.neighbors = neighbors
        return _turn(heads, cosine, sine, neighbors, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turn(gradient, cosine, sine, ctx.neighbors, -1.0), None, None, None


def _turn(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, neighbors: bool, sign: float) -> torch.Tensor:
    kernels = None if neighbors or heads.dim() != 3 or heads.stride(-1) != 1 else choose_triton_kernels(heads)
    if kernels is not None:
        return kernels.rotate_halves(heads, cosine, sine, sign)
    sine = sine if sign == 1.0 else -sine
    if neighbors:
        first, second = heads.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([second, first], -1).flatten(-2).mul_(sine).add_(heads * cosine)
    first, second = heads.chunk(2, -1)
    return torch.cat([second, first], -1).mul_(sine).add_(heads * cosine)
