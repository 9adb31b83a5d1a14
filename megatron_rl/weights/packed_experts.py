# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that pack all experts of a layer. gpt-oss has

    <block>.experts.gate_up_proj       [E, h, 2 f]  alternating columns of gate and up; `..._bias` [E, 2 f]
    <block>.experts.down_proj          [E, f, h]    `..._bias` [E, h]
    <block>.experts.<one>_blocks, _scales           instead of the weight: MXFP4, transposed

and published Qwen3.5, which is read but never written, has

    <block>.experts.gate_up_proj       [E, 2 f, h]  rows of gate, then of up
    <block>.experts.down_proj          [E, h, f]

Logical tensors are `<block>.experts.<e>.gate_proj.weight` [f, h] and so on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.weights.families import FAMILIES, ModelShape

if TYPE_CHECKING:
    import torch

BLOCKS, SCALES = "_blocks", "_scales"
_PACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks)?")
_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class PackedPart:
    """The place of a logical tensor in a packed one.

    Attributes:
        turn, turns: every `turns`-th column, from `turn` on.
        in_halves: instead, block `turn` of `turns` row blocks, not transposed.
    """

    packed: str
    expert: int
    turn: int
    turns: int
    in_halves: bool = False

    def cut(self, matrix: torch.Tensor) -> torch.Tensor:
        """View an expert's [k, turns n] as [n, k], its bias [turns n] as [n], or halves [turns n, k] as [n, k]."""
        if self.in_halves:
            return matrix.chunk(self.turns)[self.turn]
        mine = matrix[..., self.turn :: self.turns]
        return mine.t() if mine.ndim == 2 else mine


@dataclass(frozen=True)
class FileTensor:
    """A tensor to write in HF format.

    Attributes:
        experts: logical tensors of each expert, by turn; empty if unpacked.
    """

    size: tuple[int, ...]
    experts: tuple[tuple[str, ...], ...] = ()


def find_parts(packed: str, num_experts: int, *, in_halves: bool = False) -> dict[str, PackedPart]:
    """Return the logical tensors in a packed tensor of a file; empty for others."""
    match = _PACKED.fullmatch(packed)
    if match is None:
        return {}
    matrices, what = _MATRICES[match[2]], "bias" if match[3] == "_bias" else "weight"
    return {
        f"{match[1]}.{expert}.{matrix}.{what}": PackedPart(packed, expert, turn, len(matrices), in_halves)
        for expert in range(num_experts)
        for turn, matrix in enumerate(matrices)
    }


def join_turns(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack an expert's logical tensors [n, k] -> [k, turns n]."""
    import torch

    return torch.stack([matrix.t() for matrix in matrices], -1).flatten(-2)


def is_packed(shape: ModelShape) -> bool:
    """Return whether files and vLLM pack a model's experts."""
    names = FAMILIES[shape.family].experts
    return names is not None and names.is_packed


def split_turns(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace vLLM's parameters of alternating gates and ups by two views each."""
    views: dict[str, torch.Tensor] = {}
    for name, param in params.items():
        if ".w13_" in name:
            views |= {f"{name}.{one}": param[turn::2] for turn, one in enumerate(_MATRICES["gate_up_proj"])}
        else:
            views[name] = param
    return views


def list_file_tensors(shape: ModelShape) -> dict[str, FileTensor]:
    """Return name -> tensor to write in HF format."""
    packed, found = is_packed(shape), dict[str, FileTensor]()
    for name, size in shape.logical_tensors().items():
        block, is_expert, rest = name.partition(".experts.0.") if packed else (name, "", "")
        if is_expert:
            found |= _pack(f"{block}.experts", rest, size, shape.num_experts)
        elif not packed or ".experts." not in name:
            found[name] = FileTensor(size)
    return found


def _pack(block: str, first: str, size: tuple[int, ...], num_experts: int) -> dict[str, FileTensor]:
    matrix, what = first.split(".")
    for packed, matrices in _MATRICES.items():
        if matrix == matrices[0]:
            experts = tuple(tuple(f"{block}.{e}.{one}.{what}" for one in matrices) for e in range(num_experts))
            name = f"{block}.{packed}{'_bias' if what == 'bias' else ''}"
            return {name: FileTensor((num_experts, *size[1:], size[0] * len(matrices)), experts)}
    return {}
