# SPDX-License-Identifier: Apache-2.0
"""Parameters that are computed when a piece of them is read: NF4 weights, W + s B A, s B, codes.

The sum is computed in float32, in row blocks independent of the requested piece, and rounded once, so an element has
the same bits in every piece. W is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_rl.weights.quantization import QuantizedMatrix

if TYPE_CHECKING:
    from megatron_rl.weights.quantization import CodeFormat

_BLOCK_ROWS = 256


@dataclass(frozen=True)
class _Computed:
    weight: torch.Tensor | QuantizedMatrix
    scale: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device


@dataclass(frozen=True)
class MergedParam(_Computed):
    """Weight with merged adapters; `merged[rows, columns]` computes that piece of W + s B A, rounded to W's dtype.

    Attributes:
        weight: W [n, m].
        scale: s.
        parts: per adapter, the rows [start, stop) of W that it changes, A [r, m] and B [stop - start, r].
    """

    parts: Sequence[tuple[tuple[int, int], torch.Tensor, torch.Tensor]]

    @torch.no_grad()
    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        rows, columns = place
        start, stop, _ = rows.indices(len(self.weight))
        found = self.weight[start:stop, columns]
        found = found.clone() if isinstance(self.weight, torch.Tensor) else found
        for (first, last), a, b in self.parts:
            for low in range(first, last, _BLOCK_ROWS):
                high = min(low + _BLOCK_ROWS, last)
                if low >= stop or high <= start:
                    continue
                change = b[low - first : high - first].float() @ a.float()
                merged = (self.weight[low:high].float() + self.scale * change).to(self.dtype)
                inner = slice(max(low, start), min(high, stop))
                found[inner.start - start : inner.stop - start] = merged[inner.start - low : inner.stop - low, columns]
        return found


@dataclass(frozen=True)
class ScaledParam(_Computed):
    """Adapter matrix B with LoRA's scale, for engines that apply adapters unscaled.

    `scaled[rows, columns]` computes that piece of `scale` times `weight`, the actor's B.
    """

    weight: torch.Tensor

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        return (self.scale * self.weight[place].float()).to(self.dtype)


@dataclass(frozen=True)
class CodedParam:
    """Eight-bit codes of W for engines; `coded[rows, columns]` encodes that piece, int8."""

    weight: torch.Tensor | ComputedParam  # W [n, m]
    scales: torch.Tensor  # [n, 1] float32
    code_format: CodeFormat

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of read pieces."""
        return torch.int8

    @property
    def device(self) -> torch.device:
        """Device of the weight."""
        return self.weight.device

    @torch.no_grad()
    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        from megatron_rl.weights.quantization import encode

        return encode(self.weight[place], self.scales[place[0]], self.code_format)


ComputedParam = QuantizedMatrix | MergedParam | ScaledParam | CodedParam
# Parameters of a rank by name; some are computed when they are read.
SourceParams = Mapping[str, torch.Tensor | ComputedParam]
