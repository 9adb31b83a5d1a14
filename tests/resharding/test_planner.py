# SPDX-License-Identifier: Apache-2.0
"""The planner's promises over many pairs of layouts; plans are applied in this process, without messages."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.resharding.planner import ReshardPlan, TransferOp, plan_reshard
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.placement import Box, Placement, box_shape, box_slices, box_volume, rows
from shards import (
    count_writes,
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

Tables = list[list[Placement]]
WORLD = 8
PADDING_ROWS = 3
SHAPES = {
    "qwen2": make_shape("qwen2", num_kv_heads=4),
    "qwen3 tied": make_shape("qwen3", tied_embeddings=True, head_dim=6),
}
LAYOUTS = {
    "megatron tp4 pp2": dict(tp_size=4, pp_size=2), "megatron tp2 pp2 vpp2": dict(tp_size=2, pp_size=2, vpp_size=2),
    "megatron tp1 pp4": dict(pp_size=4), "megatron tp2 cp2": dict(tp_size=2, cp_size=2), "megatron dp8": {},
}
DESTINATIONS = [*LAYOUTS, "vllm tp1", "vllm tp2", "vllm tp4", "vllm tp8", "hf on rank 0"]


def make_tables(shape: ModelShape, name: str) -> Tables:
    """Tables of 8 ranks from one of the names above."""
    if name in LAYOUTS:
        return place_megatron(shape, ParallelLayout(WORLD, **LAYOUTS[name]))
    if name.startswith("vllm"):
        return place_vllm(shape, WORLD, int(name.removeprefix("vllm tp")))
    return place_on_rank_0(shape, WORLD)


def find_hf_box(op: TransferOp, tables: Tables) -> Box:
    """The HF coordinates of a transfer, from its destination."""
    for p in tables[op.dst_rank]:
        inside = all(a[0] <= b[0] and b[1] <= a[1] for a, b in zip(p.local_box, op.dst_box))
        if p.param == op.dst_param and p.hf_name == op.hf_name and inside:
            return tuple(
                (start - local[0] + hf[0], stop - local[0] + hf[0])
                for (start, stop), local, hf in zip(op.dst_box, p.local_box, p.hf_box))
    raise AssertionError(f"{op} writes outside of the destination's placements")


def find_owners(op: TransferOp, source: Tables, destination: Tables) -> list[int]:
    """Ranks that hold the whole piece of a transfer before the reshard."""
    box = find_hf_box(op, destination)
    return [
        rank for rank, table in enumerate(source)
        if any(p.hf_name == op.hf_name and all(a[0] <= b[0] and b[1] <= a[1] for a, b in zip(p.hf_box, box))
               for p in table)
    ]


def apply_plan(plan: ReshardPlan, source: list[dict[str, torch.Tensor]], destination: list[dict]) -> None:
    """Copy every piece, in plan order."""
    for op in plan.ops:
        piece = source[op.src_rank][op.src_param][box_slices(op.src_box)]
        destination[op.dst_rank][op.dst_param][box_slices(op.dst_box)] = piece


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dst_name", DESTINATIONS)
@pytest.mark.parametrize("src_name", LAYOUTS)
def test_destinations_are_filled_once_from_owners(shape: ModelShape, src_name: str, dst_name: str) -> None:
    """Exact values, padding untouched, every placed element written exactly once; expert layers are not covered."""
    full = make_full_tensors(shape)
    source, destination = make_tables(shape, src_name), make_tables(shape, dst_name)
    plan = plan_reshard(source, destination, ranks_per_node=4)
    # Sources hold UNTOUCHED in their padding: reading what a rank does not hold would show.
    held = [cut_shards(table, full, PADDING_ROWS) for table in source]
    filled = [make_empty_shards(table, padding_rows=PADDING_ROWS) for table in destination]
    apply_plan(plan, held, filled)
    for rank, table in enumerate(destination):
        assert find_differences(filled[rank], cut_shards(table, full, PADDING_ROWS)) == [], f"rank {rank}"
        for param, size in find_sizes(table, PADDING_ROWS).items():
            writes = [op.dst_box for op in plan.ops if (op.dst_rank, op.dst_param) == (rank, param)]
            placed = count_writes(size, [p.local_box for p in table if p.param == param])
            assert torch.equal(count_writes(size, writes), placed), param
    assert plan == plan_reshard(source, destination, ranks_per_node=4)


@pytest.mark.parametrize("dst_name", DESTINATIONS)
@pytest.mark.parametrize("src_name", LAYOUTS)
def test_pieces_come_from_the_nearest_owner(src_name: str, dst_name: str) -> None:
    """Self before the same node (here of 4 ranks) before any other."""
    shape = SHAPES["qwen3 tied"]
    source, destination = make_tables(shape, src_name), make_tables(shape, dst_name)
    for op in plan_reshard(source, destination, ranks_per_node=4).ops:
        owners = find_owners(op, source, destination)
        assert op.src_rank in owners
        if op.dst_rank in owners:
            assert op.is_local
        elif any(owner // 4 == op.dst_rank // 4 for owner in owners):
            assert op.src_rank // 4 == op.dst_rank // 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_equal_layouts_move_nothing(name: str) -> None:
    tables = make_tables(SHAPES["qwen2"], name)
    plan = plan_reshard(tables, tables, ranks_per_node=8)
    assert plan.moved_elements() == 0 and plan.max_peers() == 0
    assert plan.kept_elements() == sum(box_volume(p.hf_box) for table in tables for p in table)
    assert all(plan.sends(rank) == plan.receives(rank) == {} for rank in range(WORLD))
    assert all((op.src_param, op.src_box) == (op.dst_param, op.dst_box) for op in plan.ops)


def test_views_of_a_plan_agree_with_each_other() -> None:
    source = make_tables(SHAPES["qwen2"], "megatron tp2 pp2 vpp2")
    destination = make_tables(SHAPES["qwen2"], "vllm tp4")
    plan = plan_reshard(source, destination, ranks_per_node=8)
    assert plan.num_ranks == WORLD
    sends = {(a, b): ops for a in range(WORLD) for b, ops in plan.sends(a).items()}
    receives = {(a, b): ops for b in range(WORLD) for a, ops in plan.receives(b).items()}
    assert sends == receives and all(a != b for a, b in sends)
    listed = [op for ops in sends.values() for op in ops] + [op for rank in range(WORLD) for op in plan.local(rank)]
    assert sorted(map(repr, listed)) == sorted(map(repr, plan.ops))
    for (a, b), ops in sends.items():
        assert ops == [op for op in plan.ops if (op.src_rank, op.dst_rank) == (a, b)]
    degrees = [len(plan.sends(rank)) for rank in range(WORLD)] + [len(plan.receives(rank)) for rank in range(WORLD)]
    assert plan.max_peers() == max(degrees) > 0
    volume = sum(box_volume(p.hf_box) for table in destination for p in table)
    assert plan.moved_elements() + plan.kept_elements() == volume
    assert all(box_shape(op.src_box) == box_shape(op.dst_box) for op in plan.ops)


def count_egress(plan: ReshardPlan) -> list[int]:
    """Elements that each rank sends."""
    sent = [0] * plan.num_ranks
    for op in plan.ops:
        sent[op.src_rank] += op.num_elements * (not op.is_local)
    return sent


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_replicas_share_the_load(num_replicas: int, num_receivers: int, lengths: list[int]) -> None:
    """Ranks that hold the same tensors and send to others: their loads differ by at most one piece.

    Holds for replicas of everything on one node; where nodes or unique pieces decide, they come first.
    """
    table = [Placement(f"p{i}", ((0, n),), f"t{i}", ((0, n),)) for i, n in enumerate(lengths)]
    source = [table] * num_replicas + [[]] * num_receivers
    destination = [[]] * num_replicas + [table] * num_receivers
    plan = plan_reshard(source, destination, ranks_per_node=len(source))
    sent = count_egress(plan)
    assert sum(sent) == plan.moved_elements() == num_receivers * sum(lengths)
    assert max(sent[:num_replicas]) - min(sent[:num_replicas]) <= max(lengths)


def test_data_parallel_replicas_share_the_load_of_a_real_model() -> None:
    """tp2 dp4 to one engine per rank: all ranks miss one half, and no rank sends twice what another sends."""
    shape = SHAPES["qwen2"]
    plan = plan_reshard(
        place_megatron(shape, ParallelLayout(WORLD, tp_size=2)), place_vllm(shape, WORLD, 1), ranks_per_node=8)
    sent = count_egress(plan)
    by_half = defaultdict(list)
    for rank, elements in enumerate(sent):
        by_half[rank % 2].append(elements)
    largest = max(op.num_elements for op in plan.ops)
    assert all(max(loads) - min(loads) <= largest for loads in by_half.values()) and min(sent) > 0


def test_empty_placements_are_skipped() -> None:
    """A rank whose vocabulary rows are padding only neither sends nor receives for them."""
    shape = make_shape()  # 70 tokens over 4 ranks of 32 rows: the last has none
    source, destination = (place_megatron(shape, ParallelLayout(4, tp_size=4)), place_on_rank_0(shape, 4))
    plan = plan_reshard(source, destination, ranks_per_node=4)
    senders = {op.src_rank for op in plan.ops if op.hf_name == "lm_head.weight"}
    assert senders == {0, 1, 2} and min(op.num_elements for op in plan.ops) > 0


def rows_of(start: int, stop: int) -> Placement:
    """Rows of tensor `t`, two columns wide, at the start of parameter `p`."""
    return Placement("p", rows(0, stop - start, (0, 2)), "t", rows(start, stop, (0, 2)))


@pytest.mark.parametrize(("source", "reason"), [
    ([], "the source places 0 of its 12 elements"),
    ([[rows_of(0, 4)]], "the source places 8 of its 12 elements"),
    ([[rows_of(0, 4)], [rows_of(3, 6)]], r"two different source boxes place its \[\(3, 4\), \(0, 2\)\]"),
    # As many elements as the target has, but two rows twice and two never:
    ([[rows_of(0, 4)], [rows_of(2, 4)]], r"two different source boxes place its \[\(2, 4\), \(0, 2\)\]"),
], ids=["nobody", "gap", "overlap", "overlap and gap"])
def test_a_source_that_does_not_cover_is_refused(source: Tables, reason: str) -> None:
    """The message names tensor, box, rank and parameter."""
    source = source + [[]] * (3 - len(source))
    with pytest.raises(ValueError, match=rf"t\[\(0, 6\), \(0, 2\)\] for rank 2 parameter p: {reason}"):
        plan_reshard(source, [[], [], [rows_of(0, 6)]], ranks_per_node=4)


def test_source_boxes_that_overlap_elsewhere_do_no_harm() -> None:
    plan = plan_reshard([[rows_of(0, 4)], [rows_of(3, 6)]], [[rows_of(0, 3)], [rows_of(4, 6)]], ranks_per_node=2)
    assert [(op.src_rank, op.src_box) for op in plan.ops] == [(0, ((0, 3), (0, 2))), (1, ((1, 3), (0, 2)))]
