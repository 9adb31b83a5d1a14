# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer in one tensor for all gates and ups, and one for all downs. gpt-oss keeps them as

    <block>.experts.gate_up_proj       [E, h, 2 f]  columns of gate and up in turns; `..._bias` [E, 2 f]
    <block>.experts.down_proj          [E, f, h]    `..._bias` [E, h]
    <block>.experts.<one>_blocks, _scales           in place of the weight: in MXFP4, rows and columns exchanged

and published Qwen3.5 as

    <block>.experts.gate_up_proj       [E, 2 f, h]  rows of gate, then of up
    <block>.experts.down_proj          [E, h, f]

which is read and never written: transformers writes the matrices of each expert.

Logical tensors are the matrices of each expert, `<block>.experts.<e>.gate_proj.weight` [f, h] and so on.
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
    """A logical tensor as a part of a packed one.

    Attributes:
        packed: the tensor of all experts.
        expert: which of them.
        turn, turns: its columns are each of so many, from this one on.
        in_halves: its rows are this one of so many equal parts instead, and matrices are as they are.
    """

    packed: str
    expert: int
    turn: int
    turns: int
    in_halves: bool = False

    def cut(self, matrix: torch.Tensor) -> torch.Tensor:
        """The view of an expert's [k, turns n] -> [n, k], or of its bias [turns n] -> [n]; of halves [turns n, k]."""
        if self.in_halves:
            return matrix.chunk(self.turns)[self.turn]
        mine = matrix[..., self.turn :: self.turns]
        return mine.t() if mine.ndim == 2 else mine


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a model in HF format that is written.

    Attributes:
        size: its shape.
        experts: the logical tensors of each expert, by turn; none, where it is a logical tensor itself.
    """

    size: tuple[int, ...]
    experts: tuple[tuple[str, ...], ...] = ()


def find_parts(packed: str, num_experts: int, *, in_halves: bool = False) -> dict[str, PackedPart]:
    """The logical tensors of a tensor of files; none, if it is no packed one."""
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
    """What an expert is in a packed tensor: the logical tensors [n, k] of all turns -> [k, turns n]."""
    import torch

    return torch.stack([matrix.t() for matrix in matrices], -1).flatten(-2)


def is_packed(shape: ModelShape) -> bool:
    """Whether the experts of a model are packed in files, and in vLLM."""
    names = FAMILIES[shape.family].experts
    return names is not None and names.is_packed


def split_turns(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """vLLM's matrices and biases of experts; gates and ups take turns in rows, so they are two views."""
    views: dict[str, torch.Tensor] = {}
    for name, param in params.items():
        if ".w13_" in name:
            views |= {f"{name}.{one}": param[turn::2] for turn, one in enumerate(_MATRICES["gate_up_proj"])}
        else:
            views[name] = param
    return views


def list_file_tensors(shape: ModelShape) -> dict[str, FileTensor]:
    """The tensors of a model in HF format that is written, by name."""
    packed, found = is_packed(shape), dict[str, FileTensor]()
    for name, size in shape.logical_tensors().items():
        block, is_expert, rest = name.partition(".experts.0.") if packed else (name, "", "")
        if is_expert:
            found |= _pack(f"{block}.experts", rest, size, shape.num_experts)
        elif not packed or ".experts." not in name:
            found[name] = FileTensor(size)
    return found


def _pack(block: str, first: str, size: tuple[int, ...], num_experts: int) -> dict[str, FileTensor]:
    """The packed tensor whose first logical tensor is `<block>.0.<first>` of this size; none, if none begins so."""
    matrix, what = first.split(".")
    for packed, matrices in _MATRICES.items():
        if matrix == matrices[0]:
            experts = tuple(tuple(f"{block}.{e}.{one}.{what}" for one in matrices) for e in range(num_experts))
            name = f"{block}.{packed}{'_bias' if what == 'bias' else ''}"
            return {name: FileTensor((num_experts, *size[1:], size[0] * len(matrices)), experts)}
    return {}
