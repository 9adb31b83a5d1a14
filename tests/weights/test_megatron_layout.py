# SPDX-License-Identifier: Apache-2.0
"""Megatron's table: everything is placed once, fused in our order, and real GPTModels agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed import run_ranks
from megatron_rl.models.experts import list_matrices
from megatron_rl.models.gpt import build_gpt_stages, build_transformer_config
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.head_sizes import LatentSizes
from megatron_rl.weights.megatron_layout import (
    PADDED_PARAMETERS,
    megatron_placements,
    padded_vocab_size,
    stage_layers,
)
from megatron_rl.weights.row_shards import sharded_placements
from megatron_rl.weights.shard_box import ShardBox, box_shape, box_slices, check_placements
from shards import count_writes, cut_shards, make_full_tensors, make_shape, place_megatron

WHOLE = (
    "mlp.gate.weight",
    "moe.gate.weight",
    "e_score_correction_bias",
    "q_a_proj.weight",
    "kv_a_proj_with_mqa.weight",
    "mlp.router.weight",
    "mlp.router.bias",
    "o_proj.bias",
    "down_proj.bias",
    "shared_expert_gate.weight",
    "layer_scalar",
)
FAMILY_CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen2", dict(tied_embeddings=True)),
    ("qwen3", dict(head_dim=6, tied_embeddings=True)),
    ("qwen3", dict(num_kv_heads=8)),
    ("mistral", {}),
    ("qwen3_moe", dict(num_experts=8)),
    ("mixtral", {}),
    ("gpt_oss", {}),
    ("glm4_moe", {}),
    ("qwen3_next", {}),
    ("qwen3_5_text", {}),
    ("phi3", {}),
    ("deepseek_v3", {}),
    ("deepseek_v3", dict(latent=LatentSizes(0, 14, 2, 3))),
    ("glm4", {}),
    ("olmo2", {}),
    ("qwen2", dict(has_score_head=True)),
    ("gemma4_text", {}),
]


def place_replica(
    shape: ModelShape, tp_size: int, pp_size: int, vpp_size: int, ep_size: int = 1
) -> list[list[ShardBox]]:
    """Placements of all ranks that hold the experts once (and everything else `ep_size` times)."""
    return place_megatron(
        shape,
        ParallelLayout(
            tp_size * pp_size * ep_size, tp_size=tp_size, pp_size=pp_size, vpp_size=vpp_size, ep_size=ep_size
        ),
    )


@pytest.mark.parametrize(("family", "changes"), FAMILY_CHANGES)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(("pp_size", "vpp_size"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_every_element_is_placed_once_per_replica(
    family: str, changes: dict[str, Any], tp_size: int, pp_size: int, vpp_size: int
) -> None:
    """Norms, routers and the like are on all TP ranks; a tied embedding is on the first and the last stage."""
    shape = make_shape(family, **changes)
    placed: dict[str, list] = {}
    for placements in place_replica(shape, tp_size, pp_size, vpp_size):
        for p in placements:
            placed.setdefault(p.hf_name, []).append(p.hf_box)
    assert placed.keys() == shape.logical_tensors().keys()
    for name, size in shape.logical_tensors().items():
        expected = tp_size if "norm" in name or name.endswith((*WHOLE, "score.weight")) else 1
        if family == "olmo2" and name.endswith(("q_norm.weight", "k_norm.weight")):  # cut by heads
            expected = 1
        if name == "model.embed_tokens.weight" and shape.tied_embeddings and pp_size > 1:
            expected = 2
        counts = count_writes(size, placed[name])
        assert counts.min() == counts.max() == expected, name


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text"]
)
@pytest.mark.parametrize("ep_size", [2, 4, 8])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(("pp_size", "vpp_size"), [(1, 1), (2, 1), (2, 2)])
def test_expert_parallel_ranks_share_the_experts(
    family: str, ep_size: int, tp_size: int, pp_size: int, vpp_size: int
) -> None:
    """Every element of every expert is on one rank; everything else on every EP rank."""
    shape = make_shape(family, num_experts=8)
    placed: dict[str, list] = {}
    for placements in place_replica(shape, tp_size, pp_size, vpp_size, ep_size):
        for p in placements:
            placed.setdefault(p.hf_name, []).append(p.hf_box)
    assert placed.keys() == shape.logical_tensors().keys()
    for name, size in shape.logical_tensors().items():
        expected = ep_size * (tp_size if "norm" in name or name.endswith(WHOLE) else 1)
        counts = count_writes(size, placed[name])
        assert counts.min() == counts.max() == (1 if ".experts." in name else expected), name


@pytest.mark.parametrize("is_fully_sharded", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(2, tp_size=2, etp_size=1),
        ParallelLayout(2, tp_size=2, ep_size=2, etp_size=1),
        ParallelLayout(8, tp_size=2, pp_size=2, ep_size=2, etp_size=1),
        ParallelLayout(8, tp_size=2, cp_size=2, ep_size=4, etp_size=1),
    ],
    ids=ParallelLayout.describe,
)
def test_experts_that_are_not_split(layout: ParallelLayout, is_fully_sharded: bool) -> None:
    """Each is on its replicas as a whole, or in shards of them; a layer's matrices keep their usual places."""
    shape = make_shape("qwen3_moe", num_experts=4)
    counts = {name: torch.zeros(size, dtype=torch.int) for name, size in shape.logical_tensors().items()}
    for rank in layout.ranks:
        for p in (sharded_placements if is_fully_sharded else megatron_placements)(shape, layout, rank):
            counts[p.hf_name][box_slices(p.hf_box)] += 1
    for name, count in counts.items():
        if ".experts." in name or "_proj" in name:
            replicas = layout.expert_replicas if ".experts." in name else layout.cp_size * layout.dp_size
            assert count.min() == count.max() == (1 if is_fully_sharded else replicas), name


@pytest.mark.parametrize(("tp_size", "ep_size"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 4)])
def test_experts_are_small_dense_layers_in_order(tp_size: int, ep_size: int) -> None:
    """Against shards put together by index and chunk; two families with different names for the same."""
    for family, block, names in (
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
    ):
        shape = make_shape(family)
        full = make_full_tensors(shape)
        for rank, table in enumerate(place_replica(shape, tp_size, 1, 1, ep_size)):
            ep_rank, tp_rank = divmod(rank, tp_size)
            shards = cut_shards(table, full)
            for local in range(4 // ep_size):
                hf = f"model.layers.3.{block}.experts.{ep_rank * 4 // ep_size + local}."
                gate, up = (full[f"{hf}{name}.weight"].chunk(tp_size)[tp_rank] for name in names[:2])
                ours = f"0.decoder.layers.3.mlp.experts.local_experts.{local}."
                assert torch.equal(shards[f"{ours}linear_fc1.weight"], torch.cat([gate, up]))
                down = full[f"{hf}{names[2]}.weight"].chunk(tp_size, dim=1)[tp_rank]
                assert torch.equal(shards[f"{ours}linear_fc2.weight"], down)
            router = full[f"model.layers.3.{block}.gate.weight"]
            assert torch.equal(shards["0.decoder.layers.3.mlp.router.weight"], router)


@pytest.mark.parametrize(("pp_size", "vpp_size"), [(1, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("tp_size", [1, 4])
def test_local_elements_are_placed_once_and_padding_by_nobody(tp_size: int, pp_size: int, vpp_size: int) -> None:
    """70 tokens are padded to 128: of four TP ranks the last holds padding only."""
    shape = make_shape("qwen2")
    padded = padded_vocab_size(shape.vocab_size, tp_size)
    assert padded == 128
    for rank, placements in enumerate(place_replica(shape, tp_size, pp_size, vpp_size)):
        by_param: dict[str, list] = {}
        for p in placements:
            assert box_shape(p.local_box) == box_shape(p.hf_box)
            by_param.setdefault(p.param, []).append(p.local_box)
        for param, boxes in by_param.items():
            if param.endswith(PADDED_PARAMETERS):
                counts = count_writes((padded // tp_size, shape.hidden_size), boxes)
                first_row = rank % tp_size * padded // tp_size
                is_token = torch.arange(first_row, first_row + padded // tp_size) < shape.vocab_size
                assert torch.equal(counts, is_token[:, None].int().expand_as(counts)), param
            else:
                size = tuple(max(box[dim][1] for box in boxes) for dim in range(len(boxes[0])))
                assert torch.equal(count_writes(size, boxes), torch.ones(size, dtype=torch.int32)), param


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_fused_parameters_have_the_engines_order(tp_size: int) -> None:
    """Against tensors put together by view and chunk instead of boxes."""
    shape = make_shape("qwen2")
    full = make_full_tensors(shape)
    for tp_rank in range(tp_size):
        shards = cut_shards(megatron_placements(shape, ParallelLayout(tp_size, tp_size=tp_size), tp_rank), full)
        for layer in range(shape.num_layers):
            hf = {
                name: full[f"model.layers.{layer}.{name}"]
                for name in (
                    *(f"self_attn.{x}_proj.{what}" for x in "qkv" for what in ("weight", "bias")),
                    "self_attn.o_proj.weight",
                    "mlp.gate_proj.weight",
                    "mlp.up_proj.weight",
                    "mlp.down_proj.weight",
                )
            }
            for what in ("weight", "bias"):
                q, k, v = (hf[f"self_attn.{x}_proj.{what}"] for x in "qkv")
                expected = torch.cat([x.chunk(tp_size)[tp_rank] for x in (q, k, v)])
                assert torch.equal(shards[f"0.decoder.layers.{layer}.self_attention.linear_qkv.{what}"], expected)
            gate, up = (hf[f"mlp.{x}_proj.weight"].chunk(tp_size)[tp_rank] for x in ("gate", "up"))
            mlp = f"0.decoder.layers.{layer}.mlp"
            assert torch.equal(shards[f"{mlp}.linear_fc1.weight"], torch.cat([gate, up]))
            down = hf["mlp.down_proj.weight"].chunk(tp_size, dim=1)[tp_rank]
            assert torch.equal(shards[f"{mlp}.linear_fc2.weight"], down)
            out = hf["self_attn.o_proj.weight"].chunk(tp_size, dim=1)[tp_rank]
            assert torch.equal(shards[f"0.decoder.layers.{layer}.self_attention.linear_proj.weight"], out)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_stage_layers_partition_and_interleave(pp_size: int, vpp_size: int, per_chunk: int) -> None:
    """Walking the chunks as the interleaved schedule does visits the layers in order."""
    num_layers = pp_size * vpp_size * per_chunk
    layout = ParallelLayout(pp_size, pp_size=pp_size, vpp_size=vpp_size)
    walked = [
        layer
        for chunk in range(vpp_size)
        for stage in range(pp_size)
        for layer in stage_layers(num_layers, layout, stage, chunk)
    ]
    assert walked == list(range(num_layers))


@settings(max_examples=50)
@given(st.integers(1, 10_000), st.sampled_from([1, 2, 3, 4, 8, 128]))
def test_padded_vocabulary_is_the_smallest_that_fits(vocab_size: int, tp_size: int) -> None:
    padded = padded_vocab_size(vocab_size, tp_size)
    fitting = (n for n in range(vocab_size, vocab_size + 64 * tp_size + 1) if n % 64 == 0 and n % tp_size == 0)
    assert padded == next(fitting)


def check_real_model(rank: int, world_size: int, shape: ModelShape, sizes: dict[str, int]) -> list[str]:
    """Build this rank's GPTModels and compare; returns the messages of four spoilt tables."""
    groups = build_groups(ParallelLayout(world_size, **sizes))
    config = build_transformer_config(shape, groups.layout, dtype=torch.float32)
    stages = build_gpt_stages(shape, config, groups)
    params = {name: tuple(p.shape) for name, p in list_matrices(stages, torch.detach).items()}
    padded = [name for name in params if name.endswith(PADDED_PARAMETERS)]
    table = place_megatron(shape, groups.layout)[rank]
    check_placements(table, params, where="here", padded=padded)
    messages = []
    first = table[-2].param
    for spoilt in (
        [p for p in table if p.param != first],
        [*table, ShardBox("0.decoder.extra.weight", ((0, 1),), "extra", ((0, 1),))],
    ):
        with pytest.raises(ValueError) as caught:
            check_placements(spoilt, params, where="here", padded=padded)
        messages.append(str(caught.value).replace(first, "FIRST"))
    return messages


@pytest.mark.parametrize(
    ("family", "changes", "sizes", "world_size"),
    [
        ("llama", {}, {}, 1),
        ("qwen2", dict(tied_embeddings=True), {}, 1),
        ("qwen2", {}, dict(tp_size=4), 4),
        ("qwen3", dict(tied_embeddings=True, head_dim=6), dict(tp_size=2, pp_size=2), 4),
        ("qwen3", {}, dict(pp_size=2, vpp_size=2), 2),
        ("deepseek_v3", {}, dict(pp_size=2, vpp_size=2, chunk_layers=(0, 1, 3, 0)), 2),
        ("llama", dict(tied_embeddings=True), dict(pp_size=4), 4),
        ("qwen3", dict(has_score_head=True), {}, 1),
        ("llama", dict(has_score_head=True), dict(tp_size=2, pp_size=2), 4),
        ("qwen3_moe", {}, {}, 1),
        ("qwen3_moe", {}, dict(ep_size=2, tp_size=2), 4),
        ("mixtral", {}, dict(ep_size=2, pp_size=2), 4),
        ("qwen3_next", {}, dict(tp_size=2, pp_size=2), 4),
        ("qwen3_5_text", {}, dict(tp_size=2, pp_size=2), 4),
    ],
)
def test_real_models_have_exactly_these_parameters(
    family: str, changes: dict[str, Any], sizes: dict[str, int], world_size: int
) -> None:
    """Names and local shapes on every rank; values and the forward pass are tested with models/ and checkpoint/."""
    for missing, unknown in run_ranks(check_real_model, world_size, make_shape(family, **changes), sizes, timeout=90):
        assert "parameter FIRST of shape" in missing and "not in the placement table" in missing
        assert "names 0.decoder.extra.weight, which the model does not have" in unknown
