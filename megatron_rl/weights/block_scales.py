# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in FP8 with a scale per block, as DeepSeek-V3 and Qwen3 are published: read as bfloat16, never written.

A matrix `NAME` [n, m] of 8-bit floats (e4m3) has beside it `NAME_scale_inv` [ceil(n / a), ceil(m / b)] in float32. The
element in row i and column j is `code * scale[i // a, j // b]`, a product in float32 that is rounded to bfloat16
(DeepSeek-V3's `inference/kernel.py`, transformers' `finegrained_fp8`). The block [a, b] is config.json's
`quantization_config.weight_block_size`, 128 x 128. Norms, routers, embedding and head are stored unscaled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl.types import UserError

if TYPE_CHECKING:
    import torch

Block = tuple[int, int]
_SUFFIX = "_scale_inv"
_CODES = "F8_E4M3"  # in headers of safetensors
_SCALES = ("F32", "BF16")  # types of scales


def find_block(config: Mapping[str, Any]) -> Block | None:
    """Return the rows and columns that share a scale by a model's config; `None` for all other encodings."""
    described = config.get("quantization_config")
    if not isinstance(described, Mapping) or described.get("quant_method") != "fp8":
        return None
    block = described.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or described.get("fmt", "e4m3") != "e4m3":
        return None
    return (block[0], block[1]) if all(type(n) is int and n > 0 for n in block) else None


def find_scales(names: Iterable[str]) -> dict[str, str]:
    """Return matrix -> its scales, of the matrices among `names` that have scales."""
    found = set(names)
    pairs = {name.removesuffix(_SUFFIX): name for name in found if name.endswith(_SUFFIX)}
    return {matrix: scales for matrix, scales in pairs.items() if matrix in found}


def check_scales(
    headers: Mapping[str, tuple[tuple[int, ...], str]], scales: Mapping[str, str], block: Block | None, source: str
) -> None:
    """Refuse codes without scales, and scales of another shape than the blocks (UserError).

    Args:
        headers: tensor -> shape and type in safetensors.
        scales: matrix -> its scales.
        block: of config.json, if its weights are in FP8.
    """
    bare = [name for name, (_, code) in headers.items() if code.startswith("F8") and name not in scales]
    wrong = [f"{name} is {headers[name][1]} without {name}{_SUFFIX}" for name in bare]
    for name, where in scales.items():
        (size, code), (found, kind) = headers[name], headers[where]
        if block is None or code != _CODES or len(size) != 2 or kind not in _SCALES:
            wrong.append(f"{name} is {code} {list(size)} with scales in {kind}")
            continue
        expected = tuple(-(-n // edge) for n, edge in zip(size, block, strict=True))
        if found != expected:
            wrong.append(f"{where} is {list(found)}, blocks of {list(size)} are {list(expected)}")
    if wrong:
        raise UserError(
            f"{len(wrong)} tensor(s) in FP8 cannot be decoded: {'; '.join(sorted(wrong)[:3])}",
            source=source,
            expected=f"matrices of e4m3 with a scale in float32 per block of weight_block_size = {list(block or ())}",
            hint="download the checkpoint again, or convert it to bfloat16 with the model's own tools",
        )


@dataclass(frozen=True)
class BlockScaled:
    """A matrix in FP8 that is decoded piece by piece: indexed like a slice of `safe_open`, whose files it reads.

    Attributes:
        size: rows and columns.
        codes, scales: views of both tensors in their files.
    """

    size: tuple[int, ...]
    block: Block
    codes: Any
    scales: Any

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the rows and columns of two slices without steps, or the rows of one, in bfloat16."""
        index = (index, slice(None)) if isinstance(index, slice) else index
        bounds = [part.indices(n)[:2] for part, n in zip(index, self.size, strict=True)]
        blocks = tuple(slice(a // edge, -(-b // edge)) for (a, b), edge in zip(bounds, self.block, strict=True))
        codes = self.codes[tuple(slice(*pair) for pair in bounds)]
        return decode_blocks(codes, self.scales[blocks], self.block, (bounds[0][0], bounds[1][0]))


def decode_blocks(codes: torch.Tensor, scales: torch.Tensor, block: Block, start: Block = (0, 0)) -> torch.Tensor:
    """Decode a piece of a matrix to bfloat16.

    Args:
        codes: [n, m] in float8_e4m3fn.
        scales: of all blocks that the piece touches.
        start: row and column of the piece in the matrix.
    """
    import torch

    spread = scales.float()
    for dim, edge in enumerate(block):
        first = start[dim] % edge
        spread = spread.repeat_interleave(edge, dim).narrow(dim, first, codes.shape[dim])
    return (codes.float() * spread).to(torch.bfloat16)
