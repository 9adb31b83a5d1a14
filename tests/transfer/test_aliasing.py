# SPDX-License-Identifier: Apache-2.0
"""Engine parameters that may be the actor's own. Equal shapes and dtypes are checked when they are bound."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.transfer.hybrid_engine import gather_names
from megatron_rl.weights.shard_box import find_aliases
from shards import make_shape, place_megatron, place_vllm


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_equal_tp_shares_every_parameter(family: str, tp_size: int) -> None:
    """Without pipeline stages the two layouts are the same, the fused QKV included."""
    shape = make_shape(family, tied_embeddings=family == "qwen2")
    source = place_megatron(shape, ParallelLayout(tp_size, tp_size=tp_size))
    destination = place_vllm(shape, tp_size, tp_size)
    for mine, wanted in zip(source, destination, strict=True):
        assert find_aliases(mine, wanted).keys() == {p.param for p in wanted}


def test_pipeline_stage_shares_its_own_layers() -> None:
    """Stage 1 of 2 holds layers 2 and 3 of 4, the last norm and the head."""
    shape = make_shape()
    source = place_megatron(shape, ParallelLayout(2, pp_size=2))
    aliases = find_aliases(source[1], place_vllm(shape, 2, 1)[1])
    assert aliases["model.layers.2.self_attn.qkv_proj.weight"] == "0.decoder.layers.0.self_attention.linear_qkv.weight"
    assert {name.split(".")[2] for name in aliases if "layers" in name} == {"2", "3"}
    assert {name for name in aliases if "layers" not in name} == {"model.norm.weight", "lm_head.weight"}


def test_other_tp_shares_only_what_is_replicated() -> None:
    """A shard of another size is no alias; norms are whole on both sides."""
    shape = make_shape("qwen3")
    source = place_megatron(shape, ParallelLayout(2, tp_size=2))
    aliases = find_aliases(source[0], place_vllm(shape, 2, 1)[0])
    assert aliases and all("norm" in name for name in aliases)


def _gather(rank: int, world_size: int, sets: list[frozenset[str]]) -> tuple[list[frozenset[str]], int]:
    """Return the result of `gather_names` on this rank, and the number of sets sent."""
    sent, broadcast = [], dist.broadcast_object_list
    dist.broadcast_object_list = lambda objects, *args, **options: (
        sent.append(1),
        broadcast(objects, *args, **options),
    )
    return gather_names(sets[rank], dist.group.WORLD), len(sent)


@pytest.mark.parametrize(
    "sets",
    [
        [frozenset()] * 4,
        [frozenset("ab"), frozenset("c"), frozenset("ab"), frozenset("c")],
        [frozenset("d"), frozenset("c"), frozenset("b"), frozenset({"a", "bb"})],
    ],
)
def test_names_are_gathered_by_rank_and_equal_sets_travel_once(sets: list[frozenset[str]]) -> None:
    assert run_ranks(_gather, 4, sets, timeout=60) == [(sets, len(set(sets)))] * 4
