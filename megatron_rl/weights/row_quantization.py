# SPDX-License-Identifier: Apache-2.0
"""Matrices in eight bits with a scale per row (output), for engines: W[i, j] ~ s[i] code[i, j].

    s[i] = max_j |W[i, j]| / limit (1 for a row of zeros),     code[i, j] = round(W[i, j] / s[i])

with limit 127 (int8) or 448 (fp8, float8_e4m3fn), half to even, in float32. Codes are stored as int8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.placement_tables import PlacementTable, as_table
from megatron_rl.weights.shard_box import ShardBox

CodeFormat = Literal["int8", "fp8"]
SCALE_SUFFIX = "_scale"  # suffix of the parameter that holds the scales, [n, 1] float32
_LIMITS = {"int8": 127.0, "fp8": 448.0}
_KINDS = frozenset({"q.weight", "k.weight", "v.weight", "o", "gate", "up", "down"})


def list_matrices(shape: ModelShape) -> frozenset[str]:
    """Return the HF names of quantized matrices, of attention and MLPs."""
    return frozenset(name for name, kind in shape.tensor_kinds().items() if kind in _KINDS)


def list_scales(matrices: Iterable[ShardBox]) -> PlacementTable:
    """Return the placements of the row scales that belong to placed pieces of matrices."""
    return as_table(
        ShardBox(p.param + SCALE_SUFFIX, (p.local_box[0], (0, 1)), p.hf_name, (p.hf_box[0], (0, 1))) for p in matrices
    )


def find_scales(largest: torch.Tensor, code_format: CodeFormat) -> torch.Tensor:
    """Return float32 scales from the largest absolute value of each row."""
    return torch.where(largest > 0, largest / _LIMITS[code_format], 1.0)


def encode(matrix: torch.Tensor, scales: torch.Tensor, code_format: CodeFormat) -> torch.Tensor:
    """Encode a piece [n, m] of a matrix as int8.

    Args:
        scales: [n, 1] float32, of the whole rows.
    """
    limit = _LIMITS[code_format]
    scaled = (matrix.float() / scales).clamp(-limit, limit)
    return scaled.round().to(torch.int8) if code_format == "int8" else scaled.to(torch.float8_e4m3fn).view(torch.int8)


def decode(codes: torch.Tensor, code_format: CodeFormat, dtype: torch.dtype) -> torch.Tensor:
    """Return codes as numbers, without scales; exact in float32 and bfloat16."""
    return (codes if code_format == "int8" else codes.view(torch.float8_e4m3fn)).to(dtype)
