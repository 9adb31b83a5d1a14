# SPDX-License-Identifier: Apache-2.0
"""Planning by classes of tensors: the plan that a walk over all ranks gives, for work that replicas do not add to.

Values, covers and minimal bytes of plans are in test_planner.py; seconds are asserted there too, in the slow tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.transfer.planner import Planner, Shard, TensorIndex, find_classes
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.placement_tables import PlacementTable, as_table
from megatron_rl.weights.shard_box import ShardBox
from rank_plans import plan_flows
from shards import make_shape, place_megatron, place_vllm
from tools.planning import switch
from tools.planning.reshard_cost import list_flows, summarize

SHAPES = (make_shape("llama"), make_shape("qwen3", tied_embeddings=True), make_shape("qwen3_moe", num_experts=4))


def enumerate_ranks(tables: Sequence[Sequence[ShardBox]]) -> list[Shard]:
    """Every rank a shard of its own with a list of its own: nothing is shared."""
    return [Shard((rank,), list(table)) for rank, table in enumerate(tables)]


@st.composite
def moves(draw: st.DrawFn) -> tuple[ModelShape, ParallelLayout, int]:
    """A model, a training layout of at most 48 ranks, and the engine's TP."""
    shape = draw(st.sampled_from(SHAPES))
    tp, pp, cp = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2)))
    dp = draw(st.integers(1, max(1, 48 // (tp * pp * cp))))
    vpp = draw(st.sampled_from((1, 2))) if pp == 2 else 1
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if not cp * dp % n])) if shape.num_experts else 1
    layout = ParallelLayout(tp * pp * cp * dp, tp_size=tp, pp_size=pp, vpp_size=vpp, cp_size=cp, ep_size=ep)
    return shape, layout, draw(st.sampled_from([n for n in (1, 2, 4, 8) if not layout.world_size % n]))


@settings(max_examples=40, deadline=None)
@given(moves(), st.sampled_from((3, 4, 8)), st.randoms())
def test_the_plan_is_that_of_ranks_listed_one_by_one(
    move: tuple[ModelShape, ParallelLayout, int], node: int, random
) -> None:
    """Operations and their order; three ranks of each job. And the bytes of all ranks."""
    shape, layout, rollout_tp = move
    world = layout.world_size
    shared = Planner(*switch.build_shards(shape, layout, rollout_tp), ranks_per_node=node)
    listed = Planner(
        enumerate_ranks(place_megatron(shape, layout)),
        enumerate_ranks(place_vllm(shape, world, rollout_tp)),
        ranks_per_node=node,
    )
    for rank in {0, world - 1, random.randrange(world)}:
        assert shared.plan(rank) == listed.plan(rank)
    options = dict(num_ranks=world, itemsize=2, ranks_per_node=node, bucket_bytes=1)
    assert summarize(list_flows(shared), **options) == summarize(list_flows(listed), **options)
    if world <= 8:
        assert summarize(plan_flows(map(shared.plan, range(world))), **options) == summarize(
            list_flows(shared), **options
        )


def test_tables_do_not_grow_with_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call per distinct shard of either side, whatever the size of the world; and as many classes."""
    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        make = getattr(switch, name)
        monkeypatch.setattr(switch, name, lambda *args, **sizes: (calls.update([name]), make(*args, **sizes))[1])

    count("megatron_placements")
    count("vllm_placements")
    for dp in (2, 16, 128):
        layout = ParallelLayout(8 * dp, tp_size=2, pp_size=4, ep_size=2)
        source, destination = switch.build_shards(SHAPES[2], layout, 4)
        assert calls == {"megatron_placements": 2 * 4 * 2, "vllm_placements": 4}
        assert sorted(rank for shard in source for rank in shard.ranks) == list(range(layout.world_size))
        # Per stage norms of two sizes, router, q, k, v, o; embedding and head; gate, up, down per stage and EP rank.
        classes = set(find_classes(TensorIndex(source), TensorIndex(destination)).values())
        assert len(classes) == 4 * 7 + 2 + 4 * 2 * 3
        calls.clear()


def test_classes_do_not_grow_with_layers_and_experts() -> None:
    """Twice the layers and four times the experts of a rank: as many classes, of more tensors."""
    counts = []
    for layers, experts in ((4, 4), (8, 16)):
        shape = make_shape("qwen3_moe", num_layers=layers, num_experts=experts)
        source, destination = switch.build_shards(shape, ParallelLayout(8, tp_size=2, pp_size=2, ep_size=2), 4)
        classes = find_classes(TensorIndex(source), TensorIndex(destination))
        assert list(classes) == list(dict.fromkeys(p.hf_name for shard in source for p in shard.placements))
        assert all(classes[name] is found for found in set(classes.values()) for name in found.names)
        counts.append(len(set(classes.values())))
    assert counts[0] == counts[1]


def test_a_table_is_the_list_that_it_stands_for() -> None:
    """Length, indices, slices; without some parameters; and tables with shared rows share the rest of them."""
    first, second = (place_vllm(SHAPES[2], 2, 2)[rank] for rank in (0, 1))
    assert isinstance(first, PlacementTable) and first.rows is second.rows and list(first) != list(second)
    boxes = list(first)
    assert len(first) == len(boxes) and first[3] == boxes[3] and first[-2:] == boxes[-2:]
    assert list(as_table(boxes)) == boxes and as_table(first) is first
    gone = frozenset({"model.norm.weight", boxes[2].param})
    assert list(first.without(gone)) == [p for p in boxes if p.param not in gone]
    assert first.without(gone).rows is second.without(gone).rows and first.without(frozenset()) is first
