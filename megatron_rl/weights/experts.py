# SPDX-License-Identifier: Apache-2.0
"""The matrices of a mixture of experts, as views of the parameters into which engines fuse them.

Logical tensors are matrices, so a fused parameter is seen as one parameter per expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_rl.weights.families import FAMILIES, ModelShape

if TYPE_CHECKING:
    import torch


def split_experts(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace every 3-D parameter `name` by its matrices `name.<expert>`, views of the same storage."""
    views: dict[str, torch.Tensor] = {}
    for name, param in params.items():
        if param.ndim == 3:
            views |= {f"{name}.{expert}": matrix for expert, matrix in enumerate(param.unbind())}
        else:
            views[name] = param
    return views


def list_huggingface_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a transformers model, and the biases of its routers, which are buffers there."""
    names = {family.experts.bias for family in FAMILIES.values() if family.experts and family.experts.bias}
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith(tuple(names))}
    return {**dict(model.named_parameters()), **biases}


def split_huggingface_experts(shape: ModelShape, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Logical tensors as views of the parameters of a transformers model, which fuses experts in memory.

    transformers 5 holds `mlp.experts.gate_up_proj` [E, 2 * ffn, h] and `mlp.experts.down_proj` [E, h, ffn],
    whatever the family's checkpoints call them. Parameters of other names stay as they are.
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
