# SPDX-License-Identifier: Apache-2.0
"""The planner's promises over many pairs of layouts; plans are applied in this process, without messages.

The default tier has every layout of up to 4 ranks, with engines of 1, 2 and 4 ranks in turn over the families, and one
of 8 ranks each; the slow tier has all pairs.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.transfer.planner import Planner, RankPlan, Shard, TransferOp, group_shards
from megatron_rl.weights.families import FAMILIES, ModelShape
from megatron_rl.weights.head_sizes import FullHeads
from megatron_rl.weights.shard_box import Box, ShardBox, box_shape, box_slices, box_volume, intersect, rows
from rank_plans import plan_all
from shards import (
    as_shards,
    cut_shards,
    find_differences,
    find_sizes,
    make_empty_shards,
    make_full_tensors,
    make_shape,
    place_megatron,
    place_on_rank_0,
    place_vllm,
)
from tools.planning.reshard_cost import list_flows
from tools.planning.switch import build_shards

Tables = list[list[ShardBox]]
WORLD = 8
PADDING_ROWS = 3
SHAPES = {
    "llama": make_shape(),
    "mistral": make_shape("mistral"),
    "qwen2": make_shape("qwen2", tied_embeddings=True),
    "qwen3": make_shape("qwen3", head_dim=6),
    "qwen3_moe": make_shape("qwen3_moe"),
    "mixtral": make_shape("mixtral"),
    "glm4_moe": make_shape("glm4_moe"),
    "deepseek_v3": make_shape("deepseek_v3"),
    "qwen3_next": make_shape("qwen3_next"),
    "qwen3_5_text": make_shape("qwen3_5_text", tied_embeddings=True),
    "qwen3_5_moe_text": make_shape("qwen3_5_moe_text"),
    "gemma": make_shape("gemma", tied_embeddings=True),
    "gemma3_text": make_shape("gemma3_text", tied_embeddings=True),
    "phi3": make_shape("phi3"),
    "glm4": make_shape("glm4"),
    "smollm3": make_shape("smollm3", tied_embeddings=True),
    "olmo2": make_shape("olmo2"),
    "gpt_oss": make_shape("gpt_oss"),
    "minimax_m2": make_shape("minimax_m2"),
    "glm4_moe_lite": make_shape("glm4_moe_lite"),
    "gemma4_text": make_shape("gemma4_text", tied_embeddings=True),
    "gemma4 values": make_shape("gemma4_text", full_heads=FullHeads(4, 2, False)),
    "two KV heads": make_shape("qwen3", num_kv_heads=2, tied_embeddings=True),
}
ROLLOUT_TP = (1, 2, 4)
LLAMA_70B = make_shape(
    num_layers=80,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)


def find_layouts(shape: ModelShape, largest: int) -> list[ParallelLayout]:
    """tp 1, 2, 4 x pp 1, 2 x vpp 1, 2 x ep 1, 2 of up to `largest` ranks, with and without replicas."""
    layouts = []
    for tp, pp, vpp, ep in product((1, 2, 4), (1, 2), (1, 2), (1, 2)):
        smallest = tp * pp * ep
        if vpp > pp or tp > shape.num_kv_heads or (ep > 1 and not shape.num_experts) or smallest > largest:
            continue
        for world in sorted({smallest, largest}):
            layouts.append(ParallelLayout(world, tp_size=tp, pp_size=pp, vpp_size=vpp, ep_size=ep))
    if largest > 1:
        layouts.append(ParallelLayout(2, pp_size=2, vpp_size=2, chunk_layers=(0, 1, shape.num_layers - 1, 0)))
    return layouts


def make_plans(source: Tables, destination: Tables, ranks_per_node: int = 4) -> list[RankPlan]:
    """Plans of all ranks."""
    return plan_all(as_shards(source), as_shards(destination), num_ranks=len(source), ranks_per_node=ranks_per_node)


def incoming(plan: RankPlan) -> list[TransferOp]:
    """List all operations that write on a rank: local copies and receives."""
    return [*plan.local, *(op for ops in plan.receives.values() for op in ops)]


def check_written_once(plan: RankPlan, table: list[ShardBox]) -> None:
    """The placed elements are written exactly once, by the boxes of the plan."""
    writes = {name: torch.zeros(size, dtype=torch.int32) for name, size in find_sizes(table, PADDING_ROWS).items()}
    for op in incoming(plan):
        writes[op.dst_param][box_slices(op.dst_box)] += 1
    for placement in table:
        writes[placement.param][box_slices(placement.local_box)] -= 1
    assert all(not count.any() for count in writes.values())


def check_both_ends(plans: list[RankPlan]) -> None:
    """A rank's sends equal its peers' receives, in the same order; no rank sends to itself."""
    sends = {(plan.rank, peer): ops for plan in plans for peer, ops in plan.sends.items()}
    receives = {(peer, plan.rank): ops for plan in plans for peer, ops in plan.receives.items()}
    assert sends == receives and all(a != b and ops for (a, b), ops in sends.items())
    assert all((op.src_rank, op.dst_rank) == pair for pair, ops in sends.items() for op in ops)
    assert all((op.src_rank, op.dst_rank) == (plan.rank,) * 2 for plan in plans for op in plan.local)
    assert all(box_shape(op.src_box) == box_shape(op.dst_box) for plan in plans for op in incoming(plan))


def count_missing(held: list[ShardBox], wanted: list[ShardBox]) -> int:
    """Elements that a rank needs and does not hold: no plan can move fewer."""
    boxes: dict[str, set[Box]] = {}
    for placement in held:
        boxes.setdefault(placement.hf_name, set()).add(placement.hf_box)
    missing = 0
    for target in wanted:
        parts = [intersect(box, target.hf_box) for box in boxes.get(target.hf_name, ())]
        missing += box_volume(target.hf_box) - sum(box_volume(part) for part in parts if part)
    return missing


def check_plans(shape: ModelShape, source: Tables, destination: Tables) -> None:
    """Exact values, everything once, the fewest bytes, both ends alike."""
    full = make_full_tensors(shape)
    plans = make_plans(source, destination)
    # Sources hold UNTOUCHED in their padding: reading elements outside a rank's shards would show.
    held = [cut_shards(table, full, PADDING_ROWS) for table in source]
    for plan, table, mine in zip(plans, destination, source, strict=True):
        filled = make_empty_shards(table, padding_rows=PADDING_ROWS)
        for op in incoming(plan):
            filled[op.dst_param][box_slices(op.dst_box)] = held[op.src_rank][op.src_param][box_slices(op.src_box)]
        assert find_differences(filled, cut_shards(table, full, PADDING_ROWS)) == [], f"rank {plan.rank}"
        check_written_once(plan, table)
        moved = sum(op.num_elements for ops in plan.receives.values() for op in ops)
        assert moved == count_missing(mine, table), f"rank {plan.rank}"
    check_both_ends(plans)


def check_layouts(shape: ModelShape, layouts: list[ParallelLayout], rollout_tp: int) -> None:
    """Values, single writes, minimal bytes and agreement of both ends.

    In-process copies stand for messages: dtypes, transports and real engines are not covered.
    """
    for layout in layouts:
        check_plans(shape, place_megatron(shape, layout), place_vllm(shape, layout.world_size, rollout_tp))


@pytest.mark.parametrize(
    ("family", "rollout_tp"),
    [
        pytest.param(family, tp, marks=[pytest.mark.slow] * ((i + j) % 3 > 0))  # engines in turn
        for i, family in enumerate(SHAPES)
        for j, tp in enumerate(ROLLOUT_TP)
    ],
)
def test_every_layout_pair_of_up_to_4_ranks_and_some_of_8(family: str, rollout_tp: int) -> None:
    shape = SHAPES[family]
    assert {shape.family for shape in SHAPES.values()} == FAMILIES.keys(), "a new family needs a shape here"
    layouts = [layout for layout in find_layouts(shape, 4) if layout.world_size % rollout_tp == 0]
    assert len(layouts) >= 3
    large = [layout for layout in find_layouts(shape, WORLD) if layout.world_size == WORLD]
    turn = list(SHAPES).index(family) * len(ROLLOUT_TP) + ROLLOUT_TP.index(rollout_tp)
    check_layouts(shape, [*layouts, large[turn % len(large)]], rollout_tp)


@pytest.mark.slow
@pytest.mark.parametrize("rollout_tp", ROLLOUT_TP)
@pytest.mark.parametrize("family", SHAPES)
def test_every_layout_pair_of_8_ranks(family: str, rollout_tp: int) -> None:
    layouts = [layout for layout in find_layouts(SHAPES[family], WORLD) if layout.world_size == WORLD]
    assert len(layouts) >= 6
    check_layouts(SHAPES[family], layouts, rollout_tp)


EXPERT_LAYOUTS = [
    ParallelLayout(WORLD, tp_size=tp, pp_size=pp, ep_size=ep, etp_size=etp)
    for tp, pp, ep, etp in product((1, 2, 4), (1, 2), (1, 2, 4, 8), (1, 2, 4))
    if etp in {1, tp} and pp * ep * etp <= WORLD and (ep > 1 or etp == tp)
]
EXPERT_ENGINES = [(tp, ep) for tp, ep in product((1, 2, 4, 8), (2, 4, 8)) if tp <= ep]


MIXTURES = [name for name, shape in SHAPES.items() if FAMILIES[shape.family].experts]


@pytest.mark.parametrize("part", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", MIXTURES)
def test_expert_parallel_engines(family: str, part: int) -> None:
    """Layouts of 8 ranks with experts, into engines of whole experts per rank: one of `part` pairs, in turn."""
    shape, pairs = replace(SHAPES[family], num_experts=8), list(product(EXPERT_LAYOUTS, EXPERT_ENGINES))
    for layout, engine in pairs[MIXTURES.index(family) % part :: part]:
        check_plans(shape, place_megatron(shape, layout), place_vllm(shape, WORLD, *engine))


def test_experts_move_at_most_a_tenth_above_the_floor() -> None:
    """EP4 x PP2 into engines of TP2 and EP2: no rank gets what it has."""
    shape = replace(SHAPES["qwen3_moe"], num_experts=8)
    source, destination = (
        place_megatron(shape, ParallelLayout(WORLD, pp_size=2, ep_size=4)),
        place_vllm(shape, WORLD, 2, 2),
    )
    plans = make_plans(source, destination)
    for of_experts in (True, False):
        tables = [
            [[box for box in table if (".experts." in box.hf_name) == of_experts] for table in side]
            for side in (source, destination)
        ]
        floor = sum(map(count_missing, *tables))
        moved = sum(
            op.num_elements
            for plan in plans
            for ops in plan.receives.values()
            for op in ops
            if (".experts." in op.hf_name) == of_experts
        )
        assert 0 < floor <= moved <= 1.1 * floor


@pytest.mark.parametrize("family", SHAPES)
def test_other_destinations(family: str) -> None:
    """Another Megatron layout, whole tensors on rank 0, an engine as large as the job; KV heads replicated."""
    shape = SHAPES[family]
    source = place_megatron(shape, ParallelLayout(WORLD, tp_size=2, pp_size=2, vpp_size=2))
    check_plans(shape, source, place_megatron(shape, ParallelLayout(WORLD, tp_size=1, pp_size=4)))
    check_plans(shape, source, place_on_rank_0(shape, WORLD))
    check_plans(shape, source, place_vllm(shape, WORLD, 8))


def find_owners(op: TransferOp, source: Tables, destination: Tables) -> list[int]:
    """Ranks that hold the whole piece of a transfer before the reshard."""
    target = next(
        p
        for p in destination[op.dst_rank]
        if p.param == op.dst_param and p.hf_name == op.hf_name and intersect(p.local_box, op.dst_box) == op.dst_box
    )
    box = tuple(
        (start - local + first, stop - local + first)
        for (start, stop), (local, _), (first, _) in zip(op.dst_box, target.local_box, target.hf_box, strict=True)
    )
    return [
        rank
        for rank, table in enumerate(source)
        if any(p.hf_name == op.hf_name and intersect(p.hf_box, box) == box for p in table)
    ]


@pytest.mark.parametrize("rollout_tp", ROLLOUT_TP)
@pytest.mark.parametrize(
    "sizes", [dict(tp_size=2, pp_size=2), dict(pp_size=4), dict(tp_size=2, cp_size=2), {}], ids=str
)
def test_pieces_come_from_the_nearest_owner(sizes: dict[str, int], rollout_tp: int) -> None:
    """Self before the same node (here of 4 ranks) before any other."""
    shape = SHAPES["two KV heads"]
    source = place_megatron(shape, ParallelLayout(WORLD, **sizes))
    destination = place_vllm(shape, WORLD, rollout_tp)
    for op in (op for plan in make_plans(source, destination) for op in incoming(plan)):
        owners = find_owners(op, source, destination)
        assert op.src_rank in owners
        if op.dst_rank in owners:
            assert op.src_rank == op.dst_rank
        elif any(owner // 4 == op.dst_rank // 4 for owner in owners):
            assert op.src_rank // 4 == op.dst_rank // 4


@pytest.mark.parametrize("sizes", [dict(tp_size=2, pp_size=2, vpp_size=2), dict(tp_size=2, ep_size=4), {}], ids=str)
def test_equal_layouts_move_nothing(sizes: dict[str, int]) -> None:
    tables = place_megatron(SHAPES["qwen3_moe"], ParallelLayout(WORLD, **sizes))
    for plan, table in zip(make_plans(tables, tables), tables, strict=True):
        assert plan.sends == plan.receives == {}
        assert sum(op.num_elements for op in plan.local) == sum(box_volume(p.hf_box) for p in table)
        assert all((op.src_param, op.src_box) == (op.dst_param, op.dst_box) for op in plan.local)


def test_a_rank_alone_plans_what_all_plan_together() -> None:
    """Each rank works from shards of its own making, in a process of its own: nothing may be carried over."""
    source = place_megatron(SHAPES["qwen3_moe"], ParallelLayout(WORLD, tp_size=2, pp_size=2, ep_size=2))
    destination = place_vllm(SHAPES["qwen3_moe"], WORLD, 4)
    together = make_plans(source, destination)
    for rank in (6, 1):
        alone = Planner(as_shards(source), as_shards(destination), ranks_per_node=4).plan(rank)
        assert alone == together[rank]
        assert list(alone.receives) == sorted(alone.receives) and list(alone.sends) == sorted(alone.sends)


def test_groups_are_made_from_one_table_each() -> None:
    asked: list[int] = []

    def table(rank: int) -> list[ShardBox]:
        asked.append(rank)
        return [ShardBox(f"p{rank}", ((0, 1),), "t", ((0, 1),))]

    shards = group_shards(table, lambda rank: rank % 3, range(8))
    assert [shard.ranks for shard in shards] == [(0, 3, 6), (1, 4, 7), (2, 5)]
    assert asked == [0, 1, 2] and [shard.placements[0].param for shard in shards] == ["p0", "p1", "p2"]


def count_egress(source: Sequence[Shard], destination: Sequence[Shard], world: int, node: int) -> list[int]:
    """Elements that each rank sends to others."""
    sent = [0] * world
    for flow in list_flows(Planner(source, destination, ranks_per_node=node)):
        for origin, rank, elements in zip(*(column.tolist() for column in flow), strict=True):
            sent[origin] += elements * (origin != rank)
    return sent


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.lists(st.integers(1, 50), min_size=1, max_size=12),
    st.sampled_from([1, 3, 100]),
)
def test_replicas_share_the_load(num_replicas: int, num_receivers: int, lengths: list[int], node: int) -> None:
    """Ranks that hold the same tensors and send to others: their loads differ by at most one piece.

    Nodes of 3 ranks are excluded from that: there the nearest owner comes before the even load.
    """
    table = tuple(ShardBox(f"p{i}", ((0, n),), f"t{i}", ((0, n),)) for i, n in enumerate(lengths))
    source, receivers = range(num_replicas), range(num_replicas, num_replicas + num_receivers)
    shards = [Shard(tuple(source), table)], [Shard(tuple(receivers), table)]
    world = num_replicas + num_receivers
    sent = count_egress(*shards, world, node)
    assert sum(sent) == num_receivers * sum(lengths)
    if node != 3:
        assert max(sent[:num_replicas]) - min(sent[:num_replicas]) <= max(lengths)
    check_both_ends(plan_all(*shards, num_ranks=world, ranks_per_node=node))


@pytest.mark.parametrize("rollout_tp", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "world,sizes",
    [
        (1024, dict(tp_size=8, pp_size=8)),
        (120, dict(tp_size=8, pp_size=5)),
        (80, dict(tp_size=8, pp_size=2)),
        (64, dict(tp_size=4, pp_size=4, vpp_size=5)),
        (8, dict(tp_size=2, pp_size=2)),
        (8, dict(tp_size=4)),
    ],
    ids=str,
)
def test_replicas_of_a_real_model_share_the_load(world: int, sizes: dict[str, int], rollout_tp: int) -> None:
    """Busiest over mean of each shard's ranks is at most 1.1 if every replica is as near to its readers.

    Not so by design if stages straddle nodes (tp 4, pp 2, dp 3 on nodes of 8): near comes before even.
    """
    source, destination = build_shards(LLAMA_70B, ParallelLayout(world, **sizes), rollout_tp)
    sent = count_egress(source, destination, world, node=8)
    for shard in source:
        loads = [sent[rank] for rank in shard.ranks]
        assert max(loads) * len(loads) <= 1.1 * sum(loads), shard.ranks


@pytest.mark.parametrize("rollout_tp,num_overlapping", [(8, 8), (4, 2), (2, 4), (1, 8)])
def test_what_the_fixed_order_of_shards_overlaps(rollout_tp: int, num_overlapping: int) -> None:
    """Engines are runs of neighboring ranks and rank % tp fixes the shard: the number of 8 ranks that keep their own.

    At equal TP all do, which is the most that any order can give. Below it, ranks in steps of
    training tp / rollout tp would all keep theirs; docs/resharding.md gives the reason against it.
    """
    source, destination = build_shards(LLAMA_70B, ParallelLayout(8, tp_size=8), rollout_tp)
    matrices = [Planner(source, destination, ranks_per_node=8).plan(rank).local for rank in range(8)]
    keep = [any(op.hf_name.endswith("0.mlp.up_proj.weight") for op in local) for local in matrices]
    assert sum(keep) == num_overlapping


@pytest.mark.parametrize("rollout_tp", [8, 4, 2])
def test_a_70b_model_on_1024_ranks_is_planned_in_little_memory(rollout_tp: int) -> None:
    """One rank's part, tables included: at most 200 MB, few peers, everything covered.

    Seconds are not asserted here; tools/plan_reshard.py reports them.
    """
    tracemalloc.start()
    source, destination = build_shards(LLAMA_70B, ParallelLayout(1024, tp_size=8, pp_size=8), rollout_tp)
    plan = Planner(source, destination, ranks_per_node=8).plan(517)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6
    table = destination[517 % rollout_tp].placements
    assert sum(op.num_elements for op in incoming(plan)) == sum(box_volume(p.hf_box) for p in table)
    assert len(plan.receives) <= 8 * 8 // rollout_tp - 1 + 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes,rollout_tp", [(dict(tp_size=8, pp_size=16, ep_size=64), 16), (dict(pp_size=16, ep_size=32), 8)], ids=str
)
def test_a_trillion_parameters_on_8192_ranks(sizes: dict[str, int], rollout_tp: int) -> None:
    """64 layers of 384 experts in less than five seconds of CPU; both ends of a few pairs agree."""
    shape = make_shape(
        "qwen3_moe",
        num_layers=64,
        hidden_size=7168,
        ffn_hidden_size=2048,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=163840,
        num_experts=384,
    )
    start = time.process_time()
    source, destination = build_shards(shape, ParallelLayout(8192, **sizes), rollout_tp)
    planner = Planner(source, destination, ranks_per_node=8)
    plan = planner.plan(4099)
    assert time.process_time() - start < 5
    table = destination[4099 % rollout_tp].placements
    assert sum(op.num_elements for op in incoming(plan)) == sum(box_volume(p.hf_box) for p in table)
    for peer in list(plan.receives)[::200]:
        assert planner.plan(peer).sends[4099] == plan.receives[peer]


def test_empty_placements_are_skipped() -> None:
    """A rank whose vocabulary rows are padding only neither sends nor receives for them."""
    shape = make_shape()  # 70 tokens over 4 ranks of 32 rows: the last has none
    source = place_megatron(shape, ParallelLayout(4, tp_size=4))
    ops = incoming(make_plans(source, place_on_rank_0(shape, 4))[0])
    assert {op.src_rank for op in ops if op.hf_name == "lm_head.weight"} == {0, 1, 2}
    assert min(op.num_elements for op in ops) > 0


def rows_of(start: int, stop: int) -> ShardBox:
    """Rows of tensor `t`, two columns wide, at the start of parameter `p`."""
    return ShardBox("p", rows(0, stop - start, (0, 2)), "t", rows(start, stop, (0, 2)))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ([], "the source places 0 of its 12 elements"),
        ([[rows_of(0, 4)]], "the source places 8 of its 12 elements"),
        ([[rows_of(0, 4)], [rows_of(3, 6)]], r"two different source boxes place its \[\(3, 4\), \(0, 2\)\]"),
        # As many elements as the target has, but two rows twice and two never:
        ([[rows_of(0, 4)], [rows_of(2, 4)]], r"two different source boxes place its \[\(2, 4\), \(0, 2\)\]"),
    ],
    ids=["nobody", "gap", "overlap", "overlap and gap"],
)
def test_a_source_that_does_not_cover_is_refused(source: Tables, reason: str) -> None:
    """The message names tensor, box, rank and parameter; ranks that plan nothing wrong do not notice."""
    shards = as_shards(source + [[]] * (3 - len(source))), [Shard((2,), (rows_of(0, 6),))]
    with pytest.raises(ValueError, match=rf"t\[\(0, 6\), \(0, 2\)\] for rank 2 parameter p: {reason}"):
        Planner(*shards, ranks_per_node=4).plan(2)
    assert incoming(Planner(*shards, ranks_per_node=4).plan(1)) == []


def test_source_boxes_that_overlap_elsewhere_do_no_harm() -> None:
    plans = make_plans([[rows_of(0, 4)], [rows_of(3, 6)]], [[rows_of(0, 3)], [rows_of(4, 6)]])
    assert [[(op.src_rank, op.src_box) for op in plan.local] for plan in plans] == [
        [(0, ((0, 3), (0, 2)))],
        [(1, ((1, 3), (0, 2)))],
    ]


def test_a_rank_in_two_shards_is_refused() -> None:
    shard = Shard((0, 1), (rows_of(0, 2),))
    with pytest.raises(ValueError, match="rank 1 is in two shards, 0 and 1"):
        Planner([shard, Shard((1, 2), ())], [shard], ranks_per_node=4).plan(0)
