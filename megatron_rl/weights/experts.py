# SPDX-License-Identifier: Apache-2.0
"""Where both sides keep the feed-forward weights of a mixture of experts.

Megatron (SequentialMLP): EP rank r owns the experts `[r * E/ep, (r+1) * E/ep)`, each a small MLP that is
split over TP like a dense one (expert tensor parallelism = TP). vLLM: all experts on every rank, fused
per layer as `w13_weight` [E, 2 * ffn/tp, h] = `[gate; up]` and `w2_weight` [E, h, ffn/tp]. Logical tensors
are matrices, so a fused parameter is seen as E parameters with the expert's number as last name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_rl.weights.families import FAMILIES, ModelShape
from megatron_rl.weights.shard_box import ShardBox, columns, full_box, rows

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


def megatron_expert_placements(
    shape: ModelShape, param: str, hf: str, *, tp_size: int, tp_rank: int, ep_size: int, ep_rank: int
) -> list[ShardBox]:
    """Router and experts of one layer; `param` and `hf` are the prefixes of the layer."""
    per_rank = shape.num_experts // ep_size
    placements = [_router(shape, f"{param}mlp.router.weight", hf)]
    for local in range(per_rank):
        block = f"{param}mlp.experts.local_experts.{local}."
        placements += _expert(
            shape, f"{block}linear_fc1.weight", f"{block}linear_fc2.weight", hf, ep_rank * per_rank + local,
            tp_size, tp_rank)
    return placements


def vllm_expert_placements(shape: ModelShape, prefix: str, *, tp_size: int, tp_rank: int) -> list[ShardBox]:
    """Router and experts of one layer, named as `split_experts` names vLLM's fused parameters."""
    block = f"{prefix}{_block(shape)}."
    placements = [_router(shape, f"{block}gate.weight", prefix)]
    for expert in range(shape.num_experts):
        fused = f"{block}experts.routed_experts."
        placements += _expert(
            shape, f"{fused}w13_weight.{expert}", f"{fused}w2_weight.{expert}", prefix, expert, tp_size, tp_rank)
    return placements


def _block(shape: ModelShape) -> str:
    names = FAMILIES[shape.family].experts
    assert names is not None, f"{shape.family} is dense"
    return names.block


def _router(shape: ModelShape, param: str, hf: str) -> ShardBox:
    box = full_box((shape.num_experts, shape.hidden_size))
    return ShardBox(param, box, f"{hf}{_block(shape)}.gate.weight", box)


def _expert(
    shape: ModelShape, into: str, out: str, hf: str, expert: int, tp_size: int, tp_rank: int
) -> list[ShardBox]:
    """One expert: parameter `into` is `[gate; up]` of this rank's columns, `out` its part of down."""
    names = FAMILIES[shape.family].experts
    assert names is not None, f"{shape.family} is dense"
    width, size = shape.ffn_hidden_size // tp_size, (shape.ffn_hidden_size, shape.hidden_size)
    start, stop = tp_rank * width, (tp_rank + 1) * width
    matrices = f"{hf}{names.block}.experts.{expert}."
    placements = [
        ShardBox(into, rows(half * width, (half + 1) * width, size),
                  f"{matrices}{name}.weight", rows(start, stop, size))
        for half, name in enumerate((names.gate, names.up))
    ]
    turned = shape.hidden_size, shape.ffn_hidden_size
    placements.append(ShardBox(
        out, columns(0, width, turned), f"{matrices}{names.down}.weight", columns(start, stop, turned)))
    return placements
