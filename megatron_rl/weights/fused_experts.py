# SPDX-License-Identifier: Apache-2.0
"""Views of fused expert parameters as matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_rl.weights.families import FAMILIES, ModelShape
from megatron_rl.weights.packed_experts import find_parts

if TYPE_CHECKING:
    import torch

ROW_BYTES = 16  # alignment of rows that torch's grouped matrix product requires


def name_expert(param: str, expert: int) -> str:
    """Return the table name of a local expert in a Megatron parameter."""
    return param.replace(".experts.", f".experts.local_experts.{expert}.")


def find_fused(name: str) -> tuple[str, int | None]:
    """Split a table name into Megatron's parameter and the local expert (`None` if not fused)."""
    block, _, rest = name.partition(".local_experts.")
    expert, _, param = rest.partition(".")
    return (f"{block}.{param}", int(expert)) if rest else (name, None)


def name_matrix(param: str, expert: int) -> str:
    """Return the table name of an expert in an engine's parameter."""
    return f"{param}.{expert}"


def split_experts(
    params: Mapping[str, torch.Tensor], name_view: Callable[[str, int], str] = name_matrix
) -> dict[str, torch.Tensor]:
    """Replace fused expert parameters by a view per expert."""
    views: dict[str, torch.Tensor] = {}
    for name, param in params.items():
        if is_fused(name, param):
            views |= {name_view(name, expert): matrix for expert, matrix in enumerate(param.unbind())}
        else:
            views[name] = param
    return views


def join_matrices(matrices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the contiguous tensor [E, n, m] that consists of these matrices, or `None`."""
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


def is_fused(name: str, param: torch.Tensor) -> bool:
    """Return whether a parameter holds one matrix or bias per expert."""
    return param.ndim == (2 if name.endswith("bias") else 3) and ".experts." in name


def list_huggingface_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a transformers model, and its router biases, which are buffers."""
    names = {family.experts.bias for family in FAMILIES.values() if family.experts and family.experts.bias}
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
    views: dict[str, torch.Tensor] = {}
    for name, param in params.items():
        layer, _, last = name.rpartition("mlp.")
        block = f"{layer}{names.block}."
        if last == "gate.weight":
            views[block + last] = param
        elif names.is_packed and (parts := find_parts(name, shape.num_experts)):
            views |= {logical: part.cut(param[part.expert]) for logical, part in parts.items()}
        elif last == "experts.gate_up_proj":
            for expert, matrix in enumerate(param.unbind()):
                for what, half in zip((names.gate, names.up), matrix.chunk(2), strict=True):
                    views[f"{block}experts.{expert}.{what}.weight"] = half
        elif last == "experts.down_proj":
            for expert, matrix in enumerate(param.unbind()):
                views[f"{block}experts.{expert}.{names.down}.weight"] = matrix
        else:
            views[name] = param
    return views
