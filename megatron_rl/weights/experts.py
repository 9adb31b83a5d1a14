# SPDX-License-Identifier: Apache-2.0
"""Where both sides keep the feed-forward weights of a mixture of experts.

Megatron (SequentialMLP): EP rank r owns the experts `[r * E/ep, (r+1) * E/ep)`, each a small MLP that is
split over TP like a dense one (expert tensor parallelism = TP). vLLM: all experts on every rank, fused
per layer as `w13_weight` [E, 2 * ffn/tp, h] = `[gate; up]` and `w2_weight` [E, h, ffn/tp]. Logical tensors
are matrices, so a fused parameter is seen as E parameters with the expert's number as last name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from megatron_rl.weights.families import FAMILIES, ExpertNames, ModelShape
from megatron_rl.weights.tables import Row

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


def megatron_expert_rows(shape: ModelShape, experts: Iterable[int]) -> list[Row]:
    """Router and these experts of one layer, without the layer's prefixes."""
    found = [_router_row(shape, "mlp.router.weight")]
    for local, expert in enumerate(experts):
        block = f"mlp.experts.local_experts.{local}."
        found += _expert_rows(shape, f"{block}linear_fc1.weight", f"{block}linear_fc2.weight", expert)
    return found


def vllm_expert_rows(shape: ModelShape) -> list[Row]:
    """Router and experts of one layer, named as `split_experts` names vLLM's fused parameters."""
    block = _find_names(shape).block
    found = [_router_row(shape, f"{block}.gate.weight")]
    for expert in range(shape.num_experts):
        fused = f"{block}.experts.routed_experts."
        found += _expert_rows(shape, f"{fused}w13_weight.{expert}", f"{fused}w2_weight.{expert}", expert)
    return found


def _find_names(shape: ModelShape) -> ExpertNames:
    names = FAMILIES[shape.family].experts
    assert names is not None, f"{shape.family} is dense"
    return names


def _router_row(shape: ModelShape, param: str) -> Row:
    return param, f"{_find_names(shape).block}.gate.weight", "router"


def _expert_rows(shape: ModelShape, into: str, out: str, expert: int) -> list[Row]:
    """One expert: parameter `into` is `[gate; up]` of this rank's columns, `out` its part of down."""
    names = _find_names(shape)
    matrices = f"{names.block}.experts.{expert}."
    return [(into, f"{matrices}{names.gate}.weight", "gate"), (into, f"{matrices}{names.up}.weight", "up"),
            (out, f"{matrices}{names.down}.weight", "down")]
