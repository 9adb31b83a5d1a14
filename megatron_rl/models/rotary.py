# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding from explicit positions (RoFormer, arXiv 2104.09864, equation 34; halves, as in Llama).

megatron-core rotates by the row inside of a packed sequence, and under context parallelism by its own zigzag cut.
Here a token's position is given: that serves contiguous shards and responses behind a shared prompt alike.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_rl.weights.families import RopeScaling


def compute_rotary_table(
    position_ids: torch.Tensor, *, head_dim: int, theta: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position's angles.

    Args:
        position_ids: [t] int64.
        head_dim: d, even.
        theta: base of the frequencies theta^(-2i/d).
        dtype: of the result; angles are computed in float32, as transformers does.
        scaling: of the frequencies; None for none.

    Returns:
        cosine and sine, [t, 1, d] each; both numbers of a pair get their angle's, the first sine negative.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=position_ids.device).float() / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is not None:
        frequencies = _scale(frequencies, scaling)
    angles = torch.outer(position_ids.float(), frequencies)[:, None]  # [t, 1, d/2]
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)


def _scale(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (x_i, x_{i + d/2}) of [t, heads, d] by the angles of a `compute_rotary_table`."""
    return _Rotation.apply(heads, cosine, sine)


class _Rotation(torch.autograd.Function):
    """One step of autograd, whose backward turns back."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turn(heads, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turn(gradient, cosine, -sine), None, None


def _turn(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat([second, first], -1).mul_(sine).add_(heads * cosine)
