# SPDX-License-Identifier: Apache-2.0
"""Small models as full logical tensors, and the shards that a list of placements cuts out of them.

Written without the plan, the executor and the loader, so that it can be the reference for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.transfer.planner import Shard, group_shards
from megatron_rl.weights.families import FAMILIES, ModelShape
from megatron_rl.weights.head_sizes import FullHeads, LatentSizes
from megatron_rl.weights.megatron_layout import megatron_placements
from megatron_rl.weights.rollout_layout import huggingface_placements, vllm_placements
from megatron_rl.weights.shard_box import Box, ShardBox, box_slices
from megatron_rl.weights.special_parts import DeltaNetSizes, SigmoidRouter

UNTOUCHED = -7.0  # value of unplaced elements; no full tensor contains it


def make_shape(family: str = "llama", **changes: Any) -> ModelShape:
    """A model of a few thousand parameters whose sizes all differ, so that mixed-up axes show."""
    sizes: dict[str, Any] = dict(
        num_layers=4,
        hidden_size=24,
        ffn_hidden_size=40,
        num_heads=8,
        num_kv_heads=4,
        head_dim=2,
        vocab_size=70,
        tied_embeddings=False,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=64,
        qkv_bias=FAMILIES[family].qkv_bias is not False,
        qk_norm=FAMILIES[family].qk_norm is not False,
    )
    if FAMILIES[family].experts:
        sizes |= dict(num_experts=4, experts_per_token=2, normalizes_shares=True)
    if FAMILIES[family].has_latent_attention:
        sizes |= dict(latent=LatentSizes(18, 14, 2, 3), head_dim=5, rotary_dim=2, num_kv_heads=8, attention_scale=0.5)
    if family == "minimax_m2":
        sizes |= dict(router=SigmoidRouter())
    if family in ("glm4_moe", "glm4_moe_lite", "deepseek_v3"):
        sizes |= dict(dense_layers=1, dense_ffn_size=48, shared_ffn_size=32, router=SigmoidRouter())
    if family == "gpt_oss":
        sizes |= dict(sliding_layers=(0, 2), sliding_window=6)
    if FAMILIES[family].has_delta_nets:
        net = DeltaNetSizes(4, 8, 6, 5, 3, FAMILIES[family].splits_projections)
        sizes |= dict(delta_net=net, delta_layers=(0, 1, 2), shared_ffn_size=32 if FAMILIES[family].experts else 0)
    if family == "gemma3_text":
        sizes |= dict(sliding_layers=(0, 2), sliding_window=6, sliding_rope_theta=1e4, attention_scale=0.5)
    if family == "gemma4_text":
        sizes |= dict(sliding_layers=(0, 2), sliding_window=6, sliding_rope_theta=1e4, attention_scale=1.0)
        sizes |= dict(num_kv_heads=8, full_heads=FullHeads(4, 3, True), logit_softcap=5.0)
    return ModelShape(family=family, **(sizes | changes))


def make_full_tensors(shape: ModelShape, dtype: torch.dtype = torch.float32, seed: int = 1) -> dict[str, torch.Tensor]:
    """All logical tensors with random content in [0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(size, generator=generator, dtype=torch.float32).to(dtype)
        for name, size in shape.logical_tensors().items()
    }


def find_sizes(placements: Iterable[ShardBox], padding_rows: int = 0) -> dict[str, tuple[int, ...]]:
    """Parameter sizes that hold all local boxes; vocabulary parameters get `padding_rows` more."""
    sizes: dict[str, tuple[int, ...]] = {}
    for p in placements:
        stops = tuple(stop for _, stop in p.local_box)
        sizes[p.param] = tuple(map(max, sizes.get(p.param, stops), stops))
    return {
        name: (size[0] + padding_rows * ("embed" in name or "output_layer" in name or "lm_head" in name), *size[1:])
        for name, size in sizes.items()
    }


def make_empty_shards(
    placements: Sequence[ShardBox],
    dtype: torch.dtype = torch.float32,
    padding_rows: int = 0,
    fill: float = UNTOUCHED,
) -> dict[str, torch.Tensor]:
    """Parameters of one rank, filled with one number."""
    sizes = find_sizes(placements, padding_rows)
    return {name: torch.full(size, fill, dtype=dtype) for name, size in sizes.items()}


def cut_shards(
    placements: Sequence[ShardBox], full: dict[str, torch.Tensor], padding_rows: int = 0, fill: float = UNTOUCHED
) -> dict[str, torch.Tensor]:
    """Return the parameters of one rank, cut by the placements; `fill` elsewhere."""
    shards = make_empty_shards(placements, next(iter(full.values())).dtype, padding_rows, fill)
    for p in placements:
        shards[p.param][box_slices(p.local_box)] = full[p.hf_name][box_slices(p.hf_box)]
    return shards


def count_writes(size: tuple[int, ...], boxes: Iterable[Box]) -> torch.Tensor:
    """How often each element of a tensor lies in one of the boxes."""
    counts = torch.zeros(size, dtype=torch.int32)
    for box in boxes:
        counts[box_slices(box)] += 1
    return counts


def find_differences(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not bitwise equal (or exist on one side only)."""
    names = actual.keys() | expected.keys()
    return sorted(
        name
        for name in names
        if name not in actual or name not in expected or not torch.equal(actual[name], expected[name])
    )


def as_shards(tables: Sequence[Sequence[ShardBox]]) -> list[Shard]:
    """Ranks with equal tables are one shard."""
    return group_shards(tables.__getitem__, lambda rank: tuple(tables[rank]), range(len(tables)))


def place_megatron(shape: ModelShape, layout: ParallelLayout) -> list[list[ShardBox]]:
    """Tables of all ranks that train with this layout."""
    return [megatron_placements(shape, layout, rank) for rank in range(layout.world_size)]


def place_vllm(shape: ModelShape, world_size: int, tp_size: int, ep_size: int = 1) -> list[list[ShardBox]]:
    """Tables of all ranks that run engines of max(tp_size, ep_size) neighboring ranks each."""
    places = [rank % max(tp_size, ep_size) for rank in range(world_size)]
    return [vllm_placements(shape, tp_size=tp_size, place=place, ep_size=ep_size) for place in places]


def place_on_rank_0(shape: ModelShape, world_size: int) -> list[list[ShardBox]]:
    """The HF tensors on rank 0, nothing elsewhere."""
    return [huggingface_placements(shape), *([] for _ in range(world_size - 1))]
