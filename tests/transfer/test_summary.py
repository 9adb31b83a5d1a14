# SPDX-License-Identifier: Apache-2.0
"""Summaries: counted from plans and from flows alike, equal to numbers worked out by hand, predictions from them."""

from __future__ import annotations

import pytest

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.transfer.planner import Planner, Shard
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.shard_box import ShardBox, box_volume, rows
from rank_plans import plan_all, plan_flows
from shards import as_shards, make_shape, place_megatron, place_vllm
from tools._gather_path import predict_gather_seconds, summarize_gather
from tools.planning.reshard_cost import Bandwidths, ReshardSummary, list_flows, predict_seconds, summarize

BUCKET = 1 << 20
SHAPES = {"dense": make_shape("qwen2", tied_embeddings=True), "experts": make_shape("qwen3_moe")}


def make_sides(shape: ModelShape, layout: ParallelLayout, rollout_tp: int) -> tuple[list[Shard], list[Shard]]:
    """Shards of both sides."""
    return as_shards(place_megatron(shape, layout)), as_shards(place_vllm(shape, layout.world_size, rollout_tp))


def hold(tensor: str, start: int, stop: int) -> ShardBox:
    """Ten columns of some rows of a tensor."""
    return ShardBox(tensor, rows(0, stop - start, (0, 10)), tensor, rows(start, stop, (0, 10)))


@pytest.mark.parametrize("rollout_tp", [1, 2, 4])
@pytest.mark.parametrize(
    "sizes",
    [dict(tp_size=2, pp_size=2), dict(tp_size=4), dict(tp_size=2, pp_size=2, ep_size=3), dict(pp_size=4)],
    ids=str,
)
def test_plans_and_flows_give_the_same_summary(sizes: dict[str, int], rollout_tp: int) -> None:
    """12 ranks on nodes of 4: replicas do not divide evenly, so that leftover ranks are counted as well."""
    shape = SHAPES["experts" if "ep_size" in sizes else "dense"]
    if "ep_size" in sizes:
        shape = make_shape("qwen3_moe", num_experts=6)
    source, destination = make_sides(shape, ParallelLayout(12, **sizes), rollout_tp)
    options = dict(num_ranks=12, itemsize=2, ranks_per_node=4, bucket_bytes=BUCKET)
    plans = plan_all(source, destination, num_ranks=12, ranks_per_node=4)
    summary = summarize(plan_flows(plans), **options)
    assert summarize(list_flows(Planner(source, destination, ranks_per_node=4)), **options) == summary
    wanted = sum(len(s.ranks) * sum(box_volume(p.hf_box) for p in s.placements) for s in destination)
    assert summary.bytes_kept + summary.bytes_moved == 2 * wanted


def test_numbers_by_hand() -> None:
    """Rank 0 holds 4 rows of 10, rank 1 of its node needs all of them, rank 2 of the other node needs 3."""
    source = [Shard((0,), (hold("t", 0, 4),))]
    destination = [Shard((0, 1), (hold("t", 0, 4),)), Shard((2,), (hold("t", 1, 4),))]
    flows = list_flows(Planner(source, destination, ranks_per_node=2))
    summary = summarize(flows, num_ranks=4, itemsize=2, ranks_per_node=2, bucket_bytes=BUCKET)
    assert summary == ReshardSummary(
        num_ranks=4,
        bytes_kept=80,
        bytes_within_node=80,
        bytes_across_nodes=60,
        max_egress_within=80,
        max_egress_across=60,
        max_ingress_within=80,
        max_ingress_across=60,
        egress_balance=4.0,
        transient_bytes=2 * BUCKET,
    )
    assert summary.bytes_moved == 140
    fast = predict_seconds(summary, Bandwidths(within_node=40, across_nodes=60))
    assert (fast.seconds, fast.critical) == (2.0, "egress within node")
    slow = predict_seconds(summary, Bandwidths(within_node=40, across_nodes=10))
    assert (slow.seconds, slow.critical) == (6.0, "egress across nodes")


def test_pulls_within_a_node_need_no_staging() -> None:
    source, destination = make_sides(SHAPES["dense"], ParallelLayout(8, tp_size=2, pp_size=2), 4)
    flows = list(list_flows(Planner(source, destination, ranks_per_node=8)))
    summary = summarize(flows, num_ranks=8, itemsize=4, ranks_per_node=8, bucket_bytes=BUCKET)
    assert summary.bytes_moved > 0 == summary.bytes_across_nodes == summary.transient_bytes


def test_equal_layouts_take_no_time() -> None:
    source, _ = make_sides(SHAPES["dense"], ParallelLayout(8, tp_size=2, pp_size=2), 1)
    summary = summarize(
        list_flows(Planner(source, source, ranks_per_node=4)),
        num_ranks=8,
        itemsize=4,
        ranks_per_node=4,
        bucket_bytes=BUCKET,
    )
    assert summary.bytes_moved == 0 and summary.egress_balance == 1.0
    prediction = predict_seconds(summary, Bandwidths(1e9, 1e9))
    assert (prediction.seconds, prediction.critical) == (0.0, "nothing moves")


@pytest.mark.parametrize(
    "sizes,block",
    [
        (dict(tp_size=2, pp_size=2), 2),
        (dict(tp_size=4), 4),
        (dict(pp_size=4), 1),
        (dict(tp_size=2, pp_size=2, ep_size=2), 4),
    ],
    ids=str,
)
def test_the_gather_path_receives_all_that_is_not_held(sizes: dict[str, int], block: int) -> None:
    """By the busiest rank; messages that a real implementation repeats are not counted."""
    shape, layout = SHAPES["experts"], ParallelLayout(8, **sizes)
    source, _ = make_sides(shape, layout, 1)
    gather = summarize_gather(
        source, num_ranks=8, stage_ranks=8 // layout.pp_size, block_ranks=block, itemsize=2, ranks_per_node=4
    )
    tensors = shape.logical_tensors()
    sizes_of = {name: box_volume(tuple((0, n) for n in size)) for name, size in tensors.items()}
    held = [sum(box_volume(p.hf_box) for p in shard.placements) for shard in source]
    assert gather.bytes_received in {2 * (sum(sizes_of.values()) - elements) for elements in held}
    assert gather.transient_bytes == 2 * 2 * max(sizes_of.values())


def test_gather_crosses_nodes_by_stage_and_not_by_tensor_parallel_rank() -> None:
    """Two stages on two nodes of two ranks: half a stage comes from the other node, two halves from the neighbor."""
    halves = [
        Shard((stage * 2 + tp,), (hold(f"t{stage}", tp * 4, tp * 4 + 4),))
        for stage, tp in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    gather = summarize_gather(halves, num_ranks=4, stage_ranks=2, block_ranks=2, itemsize=1, ranks_per_node=2)
    assert (gather.bytes_within_node, gather.bytes_across_nodes, gather.transient_bytes) == (80, 40, 160)
    assert predict_gather_seconds(gather, Bandwidths(within_node=80, across_nodes=10)) == 5.0


@pytest.mark.parametrize("speeds", [(0, 1e9), (1e9, -1)])
def test_bandwidths_must_be_positive(speeds: tuple[float, float]) -> None:
    with pytest.raises(UserError, match="greater than 0"):
        Bandwidths(*speeds)
