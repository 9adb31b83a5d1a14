# SPDX-License-Identifier: Apache-2.0
"""Plans executed by four gloo ranks: every destination bitwise right, staging memory within its bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.resharding import executor
from megatron_rl.resharding.executor import Resharder
from megatron_rl.resharding.planner import plan_reshard
from megatron_rl.weights.placement import Placement, rows
from shards import (
    cut_shards,
    find_differences,
    make_empty_shards,
    make_full_tensors,
    make_shape,
    place_megatron,
    place_on_rank_0,
    place_vllm,
)

PADDING_ROWS = 3
PAIRS = {
    "tp2 pp2 to tp1": (dict(tp_size=2, pp_size=2), 1),
    "tp2 pp2 to tp2": (dict(tp_size=2, pp_size=2), 2),
    "tp2 pp2 to tp4": (dict(tp_size=2, pp_size=2), 4),
    "tp2 dp2 to tp1": (dict(tp_size=2), 1),
    "pp2 vpp2 dp2 to tp4": (dict(pp_size=2, vpp_size=2), 4),
    "tp2 pp2 to rank 0": (dict(tp_size=2, pp_size=2), None),
}
SHAPES = [make_shape("qwen2"), make_shape("qwen3", tied_embeddings=True, num_kv_heads=2)]


def spy_on_rounds(rounds: list[tuple[int, int]]) -> None:
    """Note the bytes sent and received in each round (of this forked process)."""
    exchange = dist.batch_isend_irecv

    def counted(works: list[dist.P2POp]) -> Any:
        totals = [sum(w.tensor.nbytes for w in works if w.op is op) for op in (dist.isend, dist.irecv)]
        rounds.append((totals[0], totals[1]))
        return exchange(works)

    executor.dist.batch_isend_irecv = counted


def reshard(
    rank: int, world_size: int, sizes: dict[str, int], tp_size: int | None, dtype: torch.dtype, bucket_bytes: int
) -> dict[str, Any]:
    """Reshard both shapes twice, with new weights the second time, and compare on this rank."""
    report: dict[str, Any] = {"differences": [], "rounds": [], "stats": []}
    spy_on_rounds(report["rounds"])
    for shape in SHAPES:
        source = place_megatron(shape, ParallelLayout(world_size, **sizes))
        destination = place_on_rank_0(shape, world_size)
        if tp_size is not None:
            destination = place_vllm(shape, world_size, tp_size)
        plan = plan_reshard(source, destination, ranks_per_node=world_size)
        held = make_empty_shards(source[rank], dtype, PADDING_ROWS)
        filled = make_empty_shards(destination[rank], dtype, PADDING_ROWS)
        resharder = Resharder(plan, held, filled, dist.group.WORLD, bucket_bytes, dtype)
        for seed in (1, 2):
            full = make_full_tensors(shape, dtype, seed)
            for name, tensor in cut_shards(source[rank], full, PADDING_ROWS).items():
                held[name].copy_(tensor)
            stats = resharder.run()
            report["differences"] += find_differences(filled, cut_shards(destination[rank], full, PADDING_ROWS))
        report["stats"].append((stats.bytes_moved, stats.bytes_copied, stats.bytes_aliased))
        report["expected_stats"] = (
            plan.moved_elements() * dtype.itemsize, plan.kept_elements() * dtype.itemsize, 0)
    return report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [1 << 10, 1 << 26], ids=["1KiB", "64MiB"])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_destination_is_bitwise_right(pair: str, bucket_bytes: int, dtype: torch.dtype) -> None:
    """Also untouched padding and staging memory; NCCL and CUDA tensors are not covered."""
    sizes, tp_size = PAIRS[pair]
    reports = run_ranks(reshard, 4, sizes, tp_size, dtype, bucket_bytes, timeout=90)
    for report in reports:
        assert report["differences"] == []
        assert report["stats"] == reports[0]["stats"] and report["stats"][-1] == report["expected_stats"]
        assert all(max(sent, received) <= bucket_bytes for sent, received in report["rounds"])
    num_rounds = max(len(report["rounds"]) for report in reports)
    # Two shapes, twice each: a large bucket needs one round, a small one many.
    assert num_rounds == 4 if bucket_bytes > 1 << 20 else num_rounds > 20


def test_equal_layouts_copy_inside_the_rank() -> None:
    """From one Megatron layout to itself no message is sent."""

    def copy(rank: int, world_size: int) -> tuple[list[str], int, int]:
        rounds: list[tuple[int, int]] = []
        spy_on_rounds(rounds)
        shape = make_shape()
        tables = place_megatron(shape, ParallelLayout(world_size, tp_size=2))
        expected = cut_shards(tables[rank], make_full_tensors(shape))
        filled = make_empty_shards(tables[rank])
        plan = plan_reshard(tables, tables, ranks_per_node=world_size)
        stats = Resharder(plan, expected, filled, dist.group.WORLD, 1 << 10, torch.float32).run()
        return find_differences(filled, expected), stats.bytes_moved, len(rounds)

    assert run_ranks(copy, 2, timeout=60) == [([], 0, 0)] * 2


def test_weights_are_converted_to_the_destinations_dtype() -> None:
    """float32 training weights for a bfloat16 engine, on ranks with and without a destination."""

    def convert(rank: int, world_size: int) -> list[str]:
        shape = make_shape()
        source = place_megatron(shape, ParallelLayout(world_size, pp_size=2))
        destination = place_vllm(shape, world_size, 2)
        full = make_full_tensors(shape)
        filled = make_empty_shards(destination[rank], torch.bfloat16)
        plan = plan_reshard(source, destination, ranks_per_node=world_size)
        Resharder(plan, cut_shards(source[rank], full), filled, dist.group.WORLD, 1 << 10, torch.bfloat16).run()
        rounded = {name: tensor.bfloat16() for name, tensor in full.items()}
        return find_differences(filled, cut_shards(destination[rank], rounded))

    assert run_ranks(convert, 2, timeout=60) == [[], []]


def test_ranks_of_a_plan_are_those_of_its_group() -> None:
    """Ranks 1 and 2 of the world are 0 and 1 of the group; parameters may be views with gradients."""

    def swap(rank: int, world_size: int) -> list[float]:
        group = dist.new_group([1, 2])
        if rank == 0:
            return []
        box = rows(0, 2, (2,))
        source = [[Placement("p", box, "t0", box)], [Placement("p", box, "t1", box)]]
        destination = [[Placement("q", box, "t1", box)], [Placement("q", box, "t0", box)]]
        plan = plan_reshard(source, destination, ranks_per_node=2)
        held = torch.nn.Parameter(torch.full((2,), float(rank)))
        filled = torch.nn.Parameter(torch.zeros(4))
        Resharder(plan, {"p": held}, {"q": filled[1:3].detach()}, group, 4, torch.float32).run()
        return filled.tolist()

    assert run_ranks(swap, 3, timeout=60) == [[], [0.0, 2.0, 2.0, 0.0], [0.0, 1.0, 1.0, 0.0]]
