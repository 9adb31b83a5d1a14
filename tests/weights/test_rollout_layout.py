# SPDX-License-Identifier: Apache-2.0
"""The rollout engines' tables against shards put together as vLLM documents them, without boxes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.packed_experts import split_experts
from megatron_rl.weights.rollout_layout import VLLM_PADDED_PARAMETERS, huggingface_placements, vllm_placements
from megatron_rl.weights.shard_box import box_shape, check_placements
from megatron_rl.weights.special_parts import DeltaNetSizes
from shards import count_writes, cut_shards, find_differences, make_full_tensors, make_shape

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", dict(num_kv_heads=8)),
    ("llama", {}),
    ("qwen2", dict(num_kv_heads=2)),
    ("qwen3", dict(num_kv_heads=1, head_dim=6, tied_embeddings=True)),
    ("mistral", dict(head_dim=6)),
    ("qwen3_moe", {}),
    ("mixtral", dict(num_experts=3)),
    ("qwen3_next", dict(delta_net=DeltaNetSizes(8, 16, 3, 5, 4))),
    ("qwen3_5_text", dict(delta_net=DeltaNetSizes(8, 16, 3, 5, 4, is_split=True))),
    ("qwen3_5_moe_text", dict(delta_net=DeltaNetSizes(8, 16, 3, 5, 4, is_split=True))),
    ("gemma4_text", {}),
]
EXPERT_MATRICES = {
    **dict.fromkeys(("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"), ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("w1", "w3", "w2"),
}


def fuse_qkv(shape: ModelShape, full: dict[str, torch.Tensor], prefix: str, what: str, tp: int, r: int) -> torch.Tensor:
    """`[Q_r; K_r; V_r]`; with more ranks than KV heads one whole head, number r // (tp / KV heads)."""
    q, k = (full[f"{prefix}self_attn.{name}_proj.{what}"] for name in "qk")
    v = full.get(f"{prefix}self_attn.v_proj.{what}", k)
    shape = shape.at(int(prefix.split(".")[2]))
    if tp <= shape.num_kv_heads:
        k_r, v_r = k.chunk(tp)[r], v.chunk(tp)[r]
    else:
        head = r // (tp // shape.num_kv_heads)
        k_r, v_r = (x.view(shape.num_kv_heads, shape.head_dim, *x.shape[1:])[head] for x in (k, v))
    return torch.cat([q.chunk(tp)[r], k_r, v_r])


def fuse_experts(shape: ModelShape, full: dict[str, torch.Tensor], tp: int, r: int) -> dict[str, torch.Tensor]:
    """Per layer `w13_weight` [E, 2 * ffn/tp, h] and `w2_weight` [E, h, ffn/tp], and the router."""
    shards, names = {}, EXPERT_MATRICES[shape.family]
    for router in (name for name in full if name.endswith(("mlp.gate.weight", "moe.gate.weight"))):
        shards[router] = full[router]
        block = router.removesuffix("gate.weight") + "experts."
        gate, up, down = (
            torch.stack([full[f"{block}{e}.{name}.weight"] for e in range(shape.num_experts)]) for name in names
        )
        shards[f"{block}routed_experts.w13_weight"] = torch.cat([gate.chunk(tp, 1)[r], up.chunk(tp, 1)[r]], 1)
        shards[f"{block}routed_experts.w2_weight"] = down.chunk(tp, 2)[r]
    return split_experts(shards)


def deal_experts(shape: ModelShape, full: dict[str, torch.Tensor], ep: int, r: int) -> dict[str, torch.Tensor]:
    """Experts r E / ep and on, whole; the shapes of `fuse_experts` otherwise."""
    size = shape.num_experts // ep
    every = range(r * size, (r + 1) * size)
    mine = {name: x for name, x in full.items() if ".experts." not in name}
    for place, expert in enumerate(every):
        own = {name: x for name, x in full.items() if f".experts.{expert}." in name}
        mine |= {name.replace(f".experts.{expert}.", f".experts.{place}."): x for name, x in own.items()}
    return fuse_experts(replace(shape, num_experts=size), mine, 1, 0)


def make_vllm_shards(shape: ModelShape, full: dict[str, torch.Tensor], tp: int, r: int) -> dict[str, torch.Tensor]:
    """Parameters of one vLLM rank, the padding rows of the vocabulary as zeros."""
    shards = fuse_experts(shape, full, tp, r) if shape.num_experts else {}
    for name, tensor in full.items():
        prefix, _, last = name.rpartition("self_attn.")
        if name in shards or ".experts." in name or last.startswith(("k_proj", "v_proj")) or "up_proj" in name:
            continue
        if "in_proj_z" in name or "in_proj_a." in name:
            continue
        if last.startswith("q_proj"):
            what = name.rpartition(".")[2]
            shards[f"{prefix}self_attn.qkv_proj.{what}"] = fuse_qkv(shape, full, prefix, what, tp, r)
        elif "gate_proj" in name:
            up = full[name.replace("gate", "up")]
            shards[name.replace("gate", "gate_up")] = torch.cat([tensor.chunk(tp)[r], up.chunk(tp)[r]])
        elif name.endswith(("in_proj_qkvz.weight", "in_proj_ba.weight", "A_log", "dt_bias")):
            shards[name] = tensor.chunk(tp)[r]
        elif "conv1d" in name:  # queries and keys of 8 heads of 3, values of 16 of 5
            shards[name] = torch.cat([part.chunk(tp)[r] for part in tensor.split([24, 24, 80])])
        elif "in_proj_qkv." in name:
            parts = [*tensor.split([24, 24, 80]), full[name.replace("qkv", "z")]]
            shards[name.replace("qkv", "qkvz")] = torch.cat([part.chunk(tp)[r] for part in parts])
        elif "in_proj_b." in name:
            logits = tensor.chunk(tp)[r], full[name.replace("_b.", "_a.")].chunk(tp)[r]
            shards[name.replace("_b.", "_ba.")] = torch.cat(logits)
        elif "shared_expert_gate" in name:
            shards[name] = tensor
        elif "o_proj" in name or "down_proj" in name or "out_proj" in name:
            shards[name] = tensor.chunk(tp, dim=1)[r]
        elif "embed_tokens" in name or "lm_head" in name:
            padding = -len(tensor) % 64
            shards[name] = torch.nn.functional.pad(tensor, (0, 0, 0, padding)).chunk(tp)[r]
        else:
            assert "norm" in name or "layer_scalar" in name
            shards[name] = tensor
    return shards


@pytest.mark.parametrize(("family", "changes"), SHAPES)
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_vllm_shards_are_as_documented(family: str, changes: dict[str, Any], tp_size: int) -> None:
    """Not compared with a running vLLM here; quantized and vision models have no table."""
    shape = make_shape(family, **changes)
    full = make_full_tensors(shape)
    for tp_rank in range(tp_size):
        expected = make_vllm_shards(shape, full, tp_size, tp_rank)
        table = vllm_placements(shape, tp_size=tp_size, place=tp_rank)
        check_placements(
            table, {name: tuple(x.shape) for name, x in expected.items()}, where="vllm", padded=VLLM_PADDED_PARAMETERS
        )
        actual = cut_shards(table, full)
        for name in {*VLLM_PADDED_PARAMETERS} & {*actual}:
            missing = len(expected[name]) - len(actual[name])
            actual[name] = torch.nn.functional.pad(actual[name], (0, 0, 0, missing))
        assert find_differences(actual, expected) == []


@pytest.mark.parametrize("family", EXPERT_MATRICES)
@pytest.mark.parametrize(("tp_size", "ep_size"), [(2, 2), (4, 4), (1, 4), (2, 8)])
def test_whole_experts_of_a_rank_are_numbered_from_0(family: str, tp_size: int, ep_size: int) -> None:
    """Each rank has whole experts; its other parameters are those of its TP rank, shared experts whole with DP."""
    shape = make_shape(family, **dict(SHAPES)[family] | dict(num_experts=8))
    full = make_full_tensors(shape)
    whole = make_vllm_shards(shape, full, 1, 0)
    shared = {name: x for name, x in whole.items() if ".shared_expert." in name and ep_size > tp_size}
    for place in range(ep_size):
        split = make_vllm_shards(shape, full, tp_size, place % tp_size) | shared
        expected = split | deal_experts(shape, full, ep_size, place)
        table = vllm_placements(shape, tp_size=tp_size, place=place, ep_size=ep_size)
        actual = cut_shards(table, full)
        names = {name for name in actual if name not in VLLM_PADDED_PARAMETERS}
        assert names == {p.param for p in table} - {*VLLM_PADDED_PARAMETERS}
        first = {name: x for name, x in expected.items() if name in names}
        assert find_differences({name: actual[name] for name in names}, first) == []


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_only_norms_and_kv_heads_are_replicated(tp_size: int) -> None:
    shape = make_shape("qwen2", num_kv_heads=2)
    placed: dict[str, list] = {}
    for tp_rank in range(tp_size):
        for p in vllm_placements(shape, tp_size=tp_size, place=tp_rank):
            assert box_shape(p.local_box) == box_shape(p.hf_box)
            placed.setdefault(p.hf_name, []).append(p.hf_box)
    for name, size in shape.logical_tensors().items():
        is_kv = "k_proj" in name or "v_proj" in name
        expected = tp_size if "norm" in name else max(1, tp_size // 2) if is_kv else 1
        counts = count_writes(size, placed[name])
        assert counts.min() == counts.max() == expected, name


def test_a_tied_head_is_no_parameter_of_its_own() -> None:
    for tied in (False, True):
        params = {p.param for p in vllm_placements(make_shape(tied_embeddings=tied), tp_size=2, place=0)}
        assert ("lm_head.weight" in params) is not tied


def test_a_vocabulary_that_does_not_split_is_refused() -> None:
    with pytest.raises(UserError, match="128 rows does not split over 3 ranks"):
        vllm_placements(make_shape(), tp_size=3, place=0)


@pytest.mark.parametrize(("family", "changes"), SHAPES)
def test_huggingface_placements_are_the_identity(family: str, changes: dict[str, Any]) -> None:
    shape = make_shape(family, **changes)
    full = make_full_tensors(shape)
    table = huggingface_placements(shape)
    check_placements(table, shape.logical_tensors(), where="hf")
    assert find_differences(cut_shards(table, full), full) == []
