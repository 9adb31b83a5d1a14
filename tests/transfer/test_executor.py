# SPDX-License-Identifier: Apache-2.0
"""Plans executed by four gloo ranks: every destination bitwise right, staging memory within its bound."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.transfer import executor, transports
from megatron_rl.transfer.executor import Resharder
from megatron_rl.transfer.planner import Planner, RankPlan, group_shards
from megatron_rl.types import UserError
from megatron_rl.weights.shard_box import ShardBox, rows
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
    "tp2 pp2 uneven to tp2": (dict(tp_size=2, pp_size=2, chunk_layers=(3, 1)), 2),
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

    transports.dist.batch_isend_irecv = counted


def plan_tables(rank: int, source: list[list[ShardBox]], destination: list[list[ShardBox]]) -> RankPlan:
    """This rank's plan; every rank is a shard of its own."""
    sides = (group_shards(lambda r, t=table: t[r], lambda r: r, range(len(table))) for table in (source, destination))
    return Planner(*sides, ranks_per_node=len(source)).plan(rank)


def reshard(
    rank: int,
    world_size: int,
    sizes: dict[str, int],
    tp_size: int | None,
    dtype: torch.dtype,
    bucket_bytes: int,
    transport: str,
) -> dict[str, Any]:
    """Reshard both shapes twice, with new weights the second time, and compare on this rank."""
    report: dict[str, Any] = {"differences": [], "rounds": [], "stats": []}
    spy_on_rounds(report["rounds"])
    for shape in SHAPES:
        source = place_megatron(shape, ParallelLayout(world_size, **sizes))
        destination = place_on_rank_0(shape, world_size)
        if tp_size is not None:
            destination = place_vllm(shape, world_size, tp_size)
        plan = plan_tables(rank, source, destination)
        held = make_empty_shards(source[rank], dtype, PADDING_ROWS)
        filled = make_empty_shards(destination[rank], dtype, PADDING_ROWS)
        resharder = Resharder(
            plan, held, filled, dist.group.WORLD, dtype=dtype, bucket_bytes=bucket_bytes, transport=transport
        )
        for seed in (1, 2):
            full = make_full_tensors(shape, dtype, seed)
            for name, tensor in cut_shards(source[rank], full, PADDING_ROWS).items():
                held[name].copy_(tensor)
            stats = resharder.run()
            report["differences"] += find_differences(filled, cut_shards(destination[rank], full, PADDING_ROWS))
        received, copied = (
            sum(op.num_elements for op in ops) * dtype.itemsize
            for ops in ([op for part in plan.receives.values() for op in part], plan.local)
        )
        report["stats"].append((stats.bytes_moved, stats.bytes_copied) == (received, copied))
        report["transient"] = max(report.get("transient", 0), resharder.transient_bytes)
        report["transport"] = resharder.transport
    return report


TRANSPORTS = [("buckets", 1 << 10), ("buckets", 1 << 26), ("pull", 1 << 10)]


@pytest.mark.parametrize(
    ("pair", "transport", "bucket_bytes", "dtype"),
    [
        pytest.param(
            *(pair, *transport, dtype),
            id=f"{pair}-{transport[0]}-{transport[1]}-{str(dtype).removeprefix('torch.')}",
            marks=[pytest.mark.slow] * ((i + j + k) % 2),  # dtypes in turn
        )
        for i, pair in enumerate(PAIRS)
        for j, transport in enumerate(TRANSPORTS)
        for k, dtype in enumerate((torch.bfloat16, torch.float32))
    ],
)
def test_every_destination_is_bitwise_right(pair: str, transport: str, bucket_bytes: int, dtype: torch.dtype) -> None:
    """Also untouched padding, byte counts and staging memory; NCCL and CUDA tensors are not covered."""
    sizes, tp_size = PAIRS[pair]
    reports = run_ranks(reshard, 4, sizes, tp_size, dtype, bucket_bytes, transport, timeout=90)
    for report in reports:
        assert report["differences"] == []
        assert all(report["stats"])
        assert report["transport"] == transport
        assert all(max(sent, received) <= max(bucket_bytes // 2, dtype.itemsize) for sent, received in report["rounds"])
        assert report["transient"] <= 2 * bucket_bytes
    num_rounds = max(len(report["rounds"]) for report in reports)
    if transport == "pull":
        assert num_rounds == 0 and all(report["transient"] == 0 for report in reports)
    else:
        assert num_rounds > 20 if bucket_bytes == 1 << 10 else num_rounds <= 3 * 4


def meet_as_on_a_gpu(rank: int, world_size: int, transport: str) -> tuple[bool, list[int], list[str]]:
    """Whether this rank has targets; sizes of the groups connected at construction; devices waited for in a run."""
    connected, waited = [], []
    executor.connect = lambda group, device: connected.append(group.size())
    executor.torch.cuda.synchronize = lambda device: waited.append(str(device))
    shape = make_shape()
    source = place_megatron(shape, ParallelLayout(world_size, tp_size=2))
    destination = place_on_rank_0(shape, world_size)
    held, filled = make_empty_shards(source[rank]), make_empty_shards(destination[rank])
    resharder = Resharder(
        plan_tables(rank, source, destination),
        held,
        filled,
        dist.group.WORLD,
        dtype=torch.float32,
        bucket_bytes=1 << 10,
        transport=transport,
    )
    resharder._device = torch.device("cuda", 0)
    resharder.run()
    return bool(filled), connected, waited


def test_ranks_without_targets_wait_for_what_their_device_has_queued() -> None:
    """Another rank pulls from them as soon as all have met. The devices are CPUs under another name."""
    found = run_ranks(meet_as_on_a_gpu, 2, "pull", timeout=60)
    assert found == [(True, [], ["cuda:0"] * 2), (False, [], ["cuda:0"] * 2)]


def test_all_ranks_connect_before_some_exchange_messages() -> None:
    assert [connected for _, connected, _ in run_ranks(meet_as_on_a_gpu, 2, "buckets", timeout=60)] == [[2], [2]]


def refuse_to_map(rank: int, world_size: int, transport: str) -> str:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: peer access is not supported between these two devices\nmore lines")

    if rank == 0:
        transports.map_params = fail
    shape = make_shape()
    source = place_megatron(shape, ParallelLayout(world_size, tp_size=2))
    destination = place_vllm(shape, world_size, 1)
    try:
        return Resharder(
            plan_tables(rank, source, destination),
            make_empty_shards(source[rank]),
            make_empty_shards(destination[rank]),
            dist.group.WORLD,
            dtype=torch.float32,
            bucket_bytes=1 << 10,
            transport=transport,
        ).transport
    except UserError as error:
        return error.found


def test_gpus_without_a_link_between_them_use_buckets_or_refuse() -> None:
    """One rank cannot map; all ranks decide alike. Not covered: a real driver."""
    assert run_ranks(refuse_to_map, 2, "auto", timeout=60) == ["buckets"] * 2
    message = "rank 0 cannot map a peer's memory: CUDA error: peer access is not supported between these two devices"
    assert run_ranks(refuse_to_map, 2, "pull", timeout=60) == [message] * 2


def test_equal_layouts_copy_inside_the_rank() -> None:
    """From one Megatron layout to itself no message is sent."""

    def copy(rank: int, world_size: int) -> tuple[list[str], int, int]:
        rounds: list[tuple[int, int]] = []
        spy_on_rounds(rounds)
        shape = make_shape()
        tables = place_megatron(shape, ParallelLayout(world_size, tp_size=2))
        expected = cut_shards(tables[rank], make_full_tensors(shape))
        filled = make_empty_shards(tables[rank])
        plan = plan_tables(rank, tables, tables)
        stats = Resharder(plan, expected, filled, dist.group.WORLD, dtype=torch.float32, bucket_bytes=1 << 10).run()
        return find_differences(filled, expected), stats.bytes_moved, len(rounds)

    assert run_ranks(copy, 2, timeout=60) == [([], 0, 0)] * 2


@pytest.mark.parametrize("transport", ["buckets", "pull"])
def test_weights_are_converted_to_the_destinations_dtype(transport: str) -> None:
    """float32 training weights for a bfloat16 engine, on ranks with and without a destination."""

    def convert(rank: int, world_size: int) -> list[str]:
        shape = make_shape()
        source = place_megatron(shape, ParallelLayout(world_size, pp_size=2))
        destination = place_vllm(shape, world_size, 2)
        full = make_full_tensors(shape)
        filled = make_empty_shards(destination[rank], torch.bfloat16)
        plan = plan_tables(rank, source, destination)
        Resharder(
            plan,
            cut_shards(source[rank], full),
            filled,
            dist.group.WORLD,
            dtype=torch.bfloat16,
            bucket_bytes=1 << 10,
            transport=transport,
        ).run()
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
        source = [[ShardBox("p", box, "t0", box)], [ShardBox("p", box, "t1", box)]]
        destination = [[ShardBox("q", box, "t1", box)], [ShardBox("q", box, "t0", box)]]
        plan = plan_tables(group.rank(), source, destination)
        held = torch.nn.Parameter(torch.full((2,), float(rank)))
        filled = torch.nn.Parameter(torch.zeros(4))
        Resharder(plan, {"p": held}, {"q": filled[1:3].detach()}, group, bucket_bytes=4, dtype=torch.float32).run()
        return filled.tolist()

    assert run_ranks(swap, 3, timeout=60) == [[], [0.0, 2.0, 2.0, 0.0], [0.0, 1.0, 1.0, 0.0]]


def switch_without_rank_2(rank: int, world_size: int, transport: str, leave: Callable[[], None]) -> str:
    """One good switch, then one without rank 2; return the errors of the other ranks."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    shape = make_shape()
    source = place_megatron(shape, ParallelLayout(world_size, tp_size=2, pp_size=2))
    destination = place_vllm(shape, world_size, 1)
    held, filled = make_empty_shards(source[rank]), make_empty_shards(destination[rank])
    resharder = Resharder(
        plan_tables(rank, source, destination),
        held,
        filled,
        group,
        bucket_bytes=1 << 12,
        transport=transport,
        dtype=torch.float32,
    )
    resharder.run()
    if rank == 2:
        leave()
        return ""
    try:
        resharder.run()
    except RuntimeError as error:
        return str(error)
    return "continued"


@pytest.mark.parametrize("transport", ["buckets", pytest.param("pull", marks=pytest.mark.slow)])
def test_a_rank_that_hangs_makes_the_others_fail(transport: str) -> None:
    """Within the timeout of the group, on every other rank, naming the awaited rank."""
    messages = run_ranks(switch_without_rank_2, 4, transport, lambda: time.sleep(6), timeout=60)
    for rank in (0, 1, 3):
        assert messages[rank].startswith(f"rank {rank} gave up waiting for"), messages


@pytest.mark.parametrize("transport", ["buckets", "pull"])
def test_a_killed_rank_makes_all_others_fail(transport: str) -> None:
    """Every survivor names the awaited rank, well before the timeout of the group."""

    def work(rank: int, world_size: int) -> tuple[str, float]:
        message = switch_without_rank_2(rank, world_size, transport, lambda: os.kill(os.getpid(), signal.SIGKILL))
        return message, time.monotonic()

    start = time.monotonic()
    results = run_ranks(work, 4, timeout=60, dying=(2,))
    for rank in (0, 1, 3):
        message, when = results[rank]
        assert message.startswith(f"rank {rank} gave up waiting for") and when - start < 30, results


def test_pull_without_shared_memory_is_refused_everywhere() -> None:
    """One rank that lacks room is enough; `auto` takes buckets instead."""

    def work(rank: int, world_size: int) -> tuple[str, str]:
        transports.missing_shared_memory = lambda params, ranks_per_node: (5 << 20) * (rank == 1)
        shape = make_shape()
        source, destination = place_megatron(shape, ParallelLayout(2, pp_size=2)), place_vllm(shape, 2, 1)
        arguments = (
            plan_tables(rank, source, destination),
            make_empty_shards(source[rank]),
            make_empty_shards(destination[rank]),
            dist.group.WORLD,
        )
        auto = Resharder(*arguments, dtype=torch.float32, bucket_bytes=1 << 12, transport="auto").transport
        try:
            Resharder(*arguments, dtype=torch.float32, bucket_bytes=1 << 12, transport="pull")
        except UserError as error:
            return auto, str(error)
        return auto, ""

    for auto, error in run_ranks(work, 2, timeout=60):
        assert auto == "buckets" and "/dev/shm lacks 5 MiB" in error
