# SPDX-License-Identifier: Apache-2.0
"""The global tensors of a distributed checkpoint: covered once, and named and ordered as megatron-core has them.

That a plain megatron-core model computes the same from them is in tests/checkpoint/test_torch_dist.py.
"""

from __future__ import annotations

import pytest
import torch

from megatron_rl.weights.families import FAMILIES
from megatron_rl.weights.megatron_layout import megatron_global_placements
from megatron_rl.weights.shard_box import box_shape, box_slices
from shards import count_writes, make_shape


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": True}, {"has_score_head": True}], ids=str)
def test_logical_and_global_tensors_are_covered_once(family, changes):
    shape = make_shape(family, **changes)
    table, sizes = megatron_global_placements(shape), shape.logical_tensors()
    assert table.keys() == sizes.keys()
    counts: dict[str, torch.Tensor] = {}
    for name, places in table.items():
        assert (count_writes(sizes[name], [place.hf_box for place in places]) == 1).all(), name
        assert [place.hf_box for place in places] == sorted(place.hf_box for place in places)
        for place in places:
            assert box_shape(place.box) == box_shape(place.hf_box)
            counts.setdefault(place.key, torch.zeros(place.shape, dtype=torch.int32))
            assert counts[place.key].shape == place.shape
            counts[place.key][place.leading][box_slices(place.box)] += 1
    assert all((count == 1).all() for count in counts.values())
    is_stacked = len([key for key in counts if "layers" in key]) < 16
    are_alike = shape.dense_layers == len(shape.delta_layers) == 0 and shape.full_heads is None
    assert is_stacked is are_alike, "layers are stacked where they are alike"


def test_query_rows_are_interleaved_per_group():
    """8 heads of 2 in 4 groups: `[q0 q1 k0 v0 q2 q3 k1 v1 ...]`."""
    shape = make_shape("qwen2", num_heads=8, num_kv_heads=4, head_dim=2)
    table, order = megatron_global_placements(shape), [""] * 32
    for name in "qkv":
        for place in table[f"model.layers.1.self_attn.{name}_proj.bias"]:
            assert place.leading == (1,) and place.shape == (4, 32)
            (start, stop), (hf_start, _) = place.box[0], place.hf_box[0]
            order[start:stop] = [f"{name}{(hf_start + i) // 2}" for i in range(stop - start)]
    heads = ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1", "q4", "q5", "k2", "v2", "q6", "q7", "k3", "v3"]
    assert order == [head for head in heads for _ in range(2)]


def test_a_group_of_shared_values_has_none():
    """8 heads of 3 in 4 groups: `[q0 q1 k0 q2 q3 k1 ...]` in full layers."""
    table, order = megatron_global_placements(make_shape("gemma4_text")), [""] * 36
    for name in "qk":
        for place in table[f"model.layers.1.self_attn.{name}_proj.weight"]:
            assert place.leading == () and place.shape == (36, 24)
            (start, stop), (hf_start, _) = place.box[0], place.hf_box[0]
            order[start:stop] = [f"{name}{(hf_start + i) // 3}" for i in range(stop - start)]
    heads = ["q0", "q1", "k0", "q2", "q3", "k1", "q4", "q5", "k2", "q6", "q7", "k3"]
    assert order == [head for head in heads for _ in range(3)]
    assert "model.layers.1.self_attn.v_proj.weight" not in table


def test_gates_are_behind_the_queries_of_their_group():
    """4 heads of 2 in 2 groups, each with a gate: `[q0 q1 g0 g1 k0 v0 ...]`, of `[q0 g0 q1 g1 q2 ...]`."""
    shape = make_shape("qwen3_next", num_heads=4, num_kv_heads=2)
    table, order = megatron_global_placements(shape), [""] * 24
    for name in "qkv":
        for place in table[f"model.layers.3.self_attn.{name}_proj.weight"]:
            assert place.leading == () and place.shape == (24, 24)
            (start, stop), (hf_start, _) = place.box[0], place.hf_box[0]
            for i in range(stop - start):
                head, half = divmod((hf_start + i) // 2, 2 if name == "q" else 1)
                order[start + i] = f"{'g' if half else name}{head}"
    heads = ["q0", "q1", "g0", "g1", "k0", "v0", "q2", "q3", "g2", "g3", "k1", "v1"]
    assert order == [head for head in heads for _ in range(2)]
