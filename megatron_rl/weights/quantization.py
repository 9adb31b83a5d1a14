# SPDX-License-Identifier: Apache-2.0
"""Quantized matrices of attention and MLPs; not embedding, norms, router or head.

NF4 (QLoRA, 2305.14314), by bitsandbytes, for frozen weights of the trainer: four bits per element, and a float32 scale
per block of 64 neighboring elements of a row. Each block is on one rank, so that values are the same in every layout.
bitsandbytes' CPU kernel silently returns wrong values unless the last dimension is a multiple of the block, so it only
gets one-dimensional tensors.

Eight bits with a scale per row (output), for engines: W[i, j] ~ s[i] code[i, j].

    s[i] = max_j |W[i, j]| / limit (1 for a row of zeros),     code[i, j] = round(W[i, j] / s[i])

with limit 127 (int8) or 448 (fp8, float8_e4m3fn), half to even, in float32. Codes are stored as int8 bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any, Literal

import torch

from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.placement_tables import PlacementTable, as_table
from megatron_rl.weights.shard_box import ShardBox

BLOCK = 64
_SINGLE = frozenset({"q.weight", "k.weight", "v.weight", "o", "gate", "up", "down"})
KINDS = _SINGLE | {"qkv", "gate_up"}
CodeFormat = Literal["int8", "fp8"]
SCALE_SUFFIX = "_scale"  # suffix of the parameter that holds the scales, [n, 1] float32
_LIMITS = {"int8": 127.0, "fp8": 448.0}
_PARAMETERS = tuple(f"linear_{name}.weight" for name in ("qkv", "proj", "fc1", "fc2"))


def is_quantized(parameter: str) -> bool:
    """Return whether NF4 applies to a Megatron parameter."""
    return parameter.endswith(_PARAMETERS)


def list_quantized(placements: PlacementTable) -> frozenset[str]:
    """Return the quantized parameters of a rank."""
    return frozenset(param for param, _, _ in placements.rows if is_quantized(param))


def count_bytes(numel: int) -> int:
    """Return the bytes of a quantized matrix, scales included."""
    return numel // 2 + numel // BLOCK * 4


def check_quantization(shape: ModelShape, tp_size: int, section: str) -> None:
    """Refuse NF4 for layouts that split a block of 64 columns, and for sigmoid routers (UserError)."""
    if shape.router is not None:
        raise UserError(
            f"{section}.quantization = nf4 with dense layers or shared experts beside a mixture of experts",
            source=f"{section}.quantization",
            expected="a dense model, or a mixture of experts without them",
            hint=f"set {section}.quantization=none",
        )
    names = _name_kinds(shape)
    sizes = shape.kind_sizes()
    for kind in sorted(KINDS & names.keys()):
        width, parts = sizes[kind][1], tp_size if kind in ("o", "down") else 1
        if width % (parts * BLOCK):
            valid = max((n for n in range(1, parts) if width % (n * BLOCK) == 0), default=None)
            raise UserError(
                f"{section}.quantization = nf4: of {names[kind]} a rank has {width // parts} columns",
                source=f"{section}.quantization, {section}.tensor_model_parallel_size and the model's config.json",
                expected=f"whole blocks of {BLOCK}: those across ranks or rows would differ from layout to layout",
                hint=f"set {section}." + (f"tensor_model_parallel_size={valid}" if valid else "quantization=none"),
            )


@lru_cache(maxsize=16)  # a planner asks for many layouts of one model
def _name_kinds(shape: ModelShape) -> Mapping[str, str]:
    """Return kind -> HF name of the model's first tensor of that kind."""
    return {kind: name for name, kind in reversed(shape.tensor_kinds().items())}


class QuantizedMatrix:
    """A matrix [n, m] in NF4, m a multiple of 64; `matrix[rows, columns]` dequantizes a piece, `matrix[:]` all.

    Blocks are independent and within rows, so an element has the same bits in every piece.
    """

    def __init__(self, like: torch.Tensor) -> None:
        assert like.shape[1] % BLOCK == 0, "check_quantization lets whole blocks pass only"
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        # [n m / 2] uint8, two elements each.
        self.codes = torch.zeros(like.numel() // 2, dtype=torch.uint8, device=like.device)
        # [n m / 64] float32, block maxima of absolute values.
        self.scales = torch.zeros(like.numel() // BLOCK, dtype=torch.float32, device=like.device)

    @torch.no_grad()
    def store(self, values: torch.Tensor) -> None:
        """Quantize values [n, m]."""
        codes, state = _load().quantize_4bit(values.reshape(-1), blocksize=BLOCK, quant_type="nf4")
        self.codes.copy_(codes.flatten())
        self.scales.copy_(state.absmax)

    def __len__(self) -> int:
        return self.shape[0]

    @torch.no_grad()
    def __getitem__(self, place: slice | tuple[slice, ...]) -> torch.Tensor:
        rows, columns = place if isinstance(place, tuple) else (place, slice(None))
        (start, stop, _), width = rows.indices(len(self)), self.shape[1]
        first, last = start * width, max(start, stop) * width
        if first == last:
            return torch.empty(0, width, dtype=self.dtype, device=self.device)[:, columns]
        scales = self.scales[first // BLOCK : last // BLOCK]
        state = _load().QuantState(
            scales, shape=torch.Size([last - first]), dtype=self.dtype, blocksize=BLOCK, quant_type="nf4"
        )
        return _load().dequantize_4bit(self.codes[first // 2 : last // 2], state).view(-1, width)[:, columns]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


@cache
def _load() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about missing faster kernels
    import bitsandbytes.functional

    return bitsandbytes.functional


def list_matrices(shape: ModelShape) -> frozenset[str]:
    """Return the HF names of quantized matrices, of attention and MLPs."""
    return frozenset(name for name, kind in shape.tensor_kinds().items() if kind in _SINGLE)


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
