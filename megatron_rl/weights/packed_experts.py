# SPDX-License-Identifier: Apache-2.0
"""Experts as matrices: views of fused parameters, and checkpoints that pack all experts of a layer. gpt-oss has

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.weights.families import FAMILIES, ModelShape
from megatron_rl.weights.model_config import find_adapters

if TYPE_CHECKING:
    import torch

    from megatron_rl.config.run_spec import RoleSpec
    from megatron_rl.parallel.layout import ParallelLayout

_BLOCKS = "_blocks"
ROW_BYTES = 16  # alignment of rows that torch's grouped matrix product requires
_PACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks)?")
_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class PackedPart:
    """Place of one expert's logical tensor in `packed`, a tensor of all experts."""

    packed: str
    expert: int
    # turn, turns: every `turns`-th column, from `turn` on, transposed.
    turn: int
    turns: int
    in_halves: bool = False  # instead, block `turn` of `turns` row blocks, not transposed

    @property
    def scales(self) -> str | None:
        """Name of the scales of an MXFP4 tensor; `None` for other tensors."""
        return self.packed.removesuffix(_BLOCKS) + "_scales" if self.packed.endswith(_BLOCKS) else None

    def cut(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the logical tensor as a view of its expert's matrix, or bias, in the packed tensor."""
        if self.in_halves:
            return matrix.chunk(self.turns)[self.turn]
        mine = matrix[..., self.turn :: self.turns]
        return mine.t() if mine.ndim == 2 else mine


@dataclass(frozen=True)
class FileTensor:
    """A tensor to write in HF format."""

    size: tuple[int, ...]
    # Names of the logical tensors packed in this tensor, per expert; empty if it packs none.
    experts: tuple[tuple[str, ...], ...] = ()


def find_parts(packed: str, num_experts: int, *, in_halves: bool = False) -> dict[str, PackedPart]:
    """Return logical tensor -> its part of a packed tensor of a file; empty for other tensors."""
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
    """Pack p matrices [n, k] of an expert as alternating columns of one, [k, p n]; biases [n] as [p n]."""
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
    """Return the tensors to write in HF format, by name in the files."""
    packed, found = is_packed(shape), dict[str, FileTensor]()
    for name, size in shape.logical_tensors().items():
        block, is_expert, rest = name.partition(".experts.0.") if packed else (name, "", "")
        matrix, _, what = rest.partition(".")
        for fused, matrices in _MATRICES.items():
            if matrix == matrices[0]:
                names = [f"{block}.experts.{e}." for e in range(shape.num_experts)]
                experts = tuple(tuple(f"{name}{one}.{what}" for one in matrices) for name in names)
                size = (shape.num_experts, *size[1:], size[0] * len(matrices))
                found[f"{block}.experts.{fused}{'_bias' if what == 'bias' else ''}"] = FileTensor(size, experts)
        if not is_expert and not (packed and ".experts." in name):
            found[name] = FileTensor(size)
    return found


def name_expert(param: str, expert: int) -> str:
    """Return the table name of a local expert in a Megatron parameter."""
    return param.replace(".experts.", f".experts.local_experts.{expert}.")


def find_fused(name: str) -> tuple[str, int | None]:
    """Split a table name into Megatron's parameter and the local expert (`None` if not fused)."""
    block, _, rest = name.partition(".local_experts.")
    expert, _, param = rest.partition(".")
    return (f"{block}.{param}", int(expert)) if rest else (name, None)


def split_experts(
    params: Mapping[str, torch.Tensor], name_view: Callable[[str, int], str] = "{}.{}".format
) -> dict[str, torch.Tensor]:
    """Replace fused expert parameters by a view per expert; `name_view`: its name, of an engine by default."""
    views: dict[str, torch.Tensor] = {}
    for name, param in params.items():
        if _is_fused(name, param):
            views |= {name_view(name, expert): matrix for expert, matrix in enumerate(param.unbind())}
        else:
            views[name] = param
    return views


def find_shared_experts(
    name: str, param: torch.Tensor, shareable: Mapping[str, torch.Tensor]
) -> tuple[list[str], torch.Tensor | None]:
    """Find the actor's tensors, `shareable` by name, that can be one parameter of an engine's experts.

    Returns:
        Their names, and one tensor of them all; `None` if any is missing or they do not fill a storage in order.
    """
    if not _is_fused(name, param):
        return [name], shareable.get(name)
    names = [f"{name}.{expert}" for expert in range(len(param))]
    return names, _join_matrices([shareable.get(view) for view in names])


def _join_matrices(matrices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    first = matrices[0]
    if first is None:
        return None
    for place, matrix in enumerate(matrices):
        if matrix is None or not matrix.is_contiguous() or matrix.shape != first.shape:
            return None
        is_same = matrix.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_same or matrix.storage_offset() != first.storage_offset() + place * first.numel():
            return None
    return first.as_strided((len(matrices), *first.shape), (first.numel(), *first.stride()))


def _is_fused(name: str, param: torch.Tensor) -> bool:
    """Return whether a parameter holds one matrix or bias per expert."""
    return param.ndim == (2 if name.endswith("bias") else 3) and ".experts." in name


def list_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a model of transformers or vLLM, and the weights that are buffers.

    These are router biases of the former, and scalars of layers.
    """
    names = {"layer_scalar"} | {
        family.experts.bias for family in FAMILIES.values() if family.experts and family.experts.bias
    }
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith(tuple(names))}
    return {**dict(model.named_parameters()), **biases}


def split_huggingface_experts(shape: ModelShape, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return logical tensors as views of the parameters of a transformers model, which fuses experts.

    transformers 5 holds `mlp.experts.gate_up_proj` [E, 2 * ffn, h] and `mlp.experts.down_proj` [E, h, ffn] for all
    families but gpt-oss, which is packed as in its checkpoints.
    """
    names = FAMILIES[shape.family].experts
    if names is None:
        return dict(params)
    renamed = {"gate_proj": names.gate, "up_proj": names.up, "down_proj": names.down}
    views: dict[str, torch.Tensor] = {}
    for name, param in params.items():
        layer, _, last = name.rpartition("mlp.")
        block = f"{layer}{names.block}."
        parts = find_parts(name, shape.num_experts, in_halves=not names.is_packed)
        assert not parts or (layer and len(param) == shape.num_experts), f"{name} is not of transformers 5"
        for logical, part in parts.items():
            *_, matrix, what = logical.split(".")
            views[f"{block}experts.{part.expert}.{renamed[matrix]}.{what}"] = part.cut(param[part.expert])
        if not parts:
            views[block + last if last in ("gate.weight", names.bias) else name] = param
    return views


def why_in_turn(spec: RoleSpec, shape: ModelShape, layout: ParallelLayout, itemsize: int) -> str:
    """Return why experts need one matrix product each, "" if one product serves all (`models/experts.py`).

    Args:
        itemsize: bytes of an element.
    """
    multiple = ROW_BYTES // itemsize
    if spec.batch_invariant:
        return "rollout.bitwise"
    if spec.is_quantized:
        return f"{spec.section}.quantization=nf4"
    lengths = {"hidden_size": shape.hidden_size, "moe_intermediate_size / ETP": shape.ffn_hidden_size}
    lengths["moe_intermediate_size / ETP"] //= layout.expert_tp_size
    adapters = find_adapters(shape, spec.lora, spec.section)
    if adapters is not None and adapters.has_experts:
        lengths[f"{spec.section}.lora.rank"] = adapters.rank
    odd = [f"{name} = {length} is no multiple of {multiple}" for name, length in lengths.items() if length % multiple]
    return ", ".join(odd)
