# SPDX-License-Identifier: Apache-2.0
"""The shared collectives, on three gloo ranks (one is enough for behavior of a group of one)."""

from __future__ import annotations

import os
import resource
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as library

from distributed import run_ranks
from megatron_rl.parallel import collectives
from megatron_rl.types import UserError


@pytest.mark.parametrize("content", [[[1, 2, 3], [], [4]], [[], [], []], [[255] * 1000, [0], [7, 7]]])
def test_gather_flat_brings_what_every_rank_has(content: list[list[int]]) -> None:
    """Also from ranks with nothing; a rank counts received bytes only."""

    def gather(rank: int, world_size: int) -> tuple[list[list[int]], int]:
        found, received = collectives.gather_flat(np.array(content[rank], np.uint8), dist.group.WORLD)
        return [piece.tolist() for piece in found], received

    total = sum(map(len, content))
    assert run_ranks(gather, 3, timeout=60) == [(content, total - len(own)) for own in content]


def test_raise_together_raises_the_lowest_failing_ranks_error_everywhere() -> None:
    def fail(rank: int, world_size: int) -> tuple[str, str, str, str]:
        error = None
        if rank > 0:
            error = UserError(f"rank {rank} found no file", source="data.files", expected="a file", hint="write one")
        try:
            collectives.raise_together(error, dist.group.WORLD)
        except UserError as caught:
            return caught.found, caught.source, caught.expected, caught.hint
        raise AssertionError("nothing was raised")

    parts = ("rank 1 found no file", "data.files", "a file", "write one")
    assert run_ranks(fail, 3, timeout=60) == [parts] * 3


class OddError(Exception):
    """Cannot be unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def test_raise_together_says_where_it_came_from() -> None:
    """Marked on all ranks; the rank itself keeps the error and its traceback, also of a class that cannot travel."""

    def fail(rank: int, world_size: int) -> tuple[str, str, int, list[str]]:
        group = dist.new_group([1, 2])
        if rank == 0:
            return "", "", 0, []
        error = None
        if rank == 2:
            try:
                raise OddError("o", "dd")
            except OddError as caught:
                error = caught
        try:
            collectives.raise_together(error, group)
        except Exception as caught:
            frames = [frame.name for frame in traceback.extract_tb(caught.__traceback__)]
            return type(caught).__name__, str(caught), caught.raised_on, frames
        raise AssertionError("nothing was raised")

    found = run_ranks(fail, 3, timeout=60)
    assert found[1][:3] == ("RuntimeError", "OddError: odd", 2) and found[2][:3] == ("OddError", "odd", 2)
    assert found[2][3] == ["fail", "raise_together", "fail"]


def test_raise_together_is_silent_when_all_is_well() -> None:
    assert run_ranks(lambda rank, size: collectives.raise_together(None, dist.group.WORLD), 2, timeout=60) == [None] * 2


def test_all_well_is_one_number() -> None:
    """No object is pickled, whatever the number of ranks; an error is pickled on its own rank only, and sent once."""

    def count(rank: int, world_size: int) -> tuple[int, int]:
        pickled, pack = [0], library._object_to_tensor
        library._object_to_tensor = lambda *args: pickled.__setitem__(0, pickled[0] + 1) or pack(*args)
        collectives.raise_together(None, dist.group.WORLD)
        well = pickled[0]
        with pytest.raises(RuntimeError, match="planted"):
            collectives.raise_together(RuntimeError("planted") if rank == 1 else None, dist.group.WORLD)
        return well, pickled[0]

    assert run_ranks(count, 3, timeout=60) == [(0, 0), (0, 1), (0, 0)]


def test_the_limit_of_open_files_is_raised_for_many_ranks() -> None:
    """Of a fork, since a hard limit cannot be raised again. Not covered: that many ranks, see below."""

    def limit(rank: int, world_size: int) -> tuple[int, str]:
        kind, (_, hard) = resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(kind, (1024, hard))
        collectives.allow_connections(1024)
        raised = resource.getrlimit(kind)[0]
        resource.setrlimit(kind, (1024, 2000))
        with pytest.raises(UserError) as caught:
            collectives.allow_connections(1024)
        return raised, caught.value.found

    assert run_ranks(limit, 1, timeout=60) == [(2560, "a process may have 2000 open files")]


def _join_many(rank: int, world_size: int, soft_limit: int) -> tuple[int, int, float]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    collectives.allow_connections(world_size)
    begun = time.perf_counter()
    group = collectives.make_group(range(world_size), timedelta(seconds=300))
    assert group is not None
    for _ in range(3):
        collectives.raise_together(None, group)
    return len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[0], time.perf_counter() - begun


@pytest.mark.slow
def test_256_processes_of_one_host_join_a_group() -> None:
    """Each is connected with all others: a limit of 256 open files, which they start with, would not do.

    A job of 256 processes is started here, and nothing of it but its groups.
    """
    found = run_ranks(_join_many, 256, 256, timeout=600)
    files, limits, seconds = zip(*found, strict=True)
    assert min(files) > 255 and max(files) <= min(limits)
    print(f"{max(files)} open files of {limits[0]}, {max(seconds):.1f} s for a group of 256 and three checks")


def test_reduce_scalars_keeps_float64_and_names() -> None:
    def reduce(rank: int, world_size: int) -> tuple[dict[str, float], ...]:
        group, cpu = dist.group.WORLD, torch.device("cpu")
        values = {"loss": 0.1 * (rank + 1), "tokens": 2.0**40 + rank}
        ops = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
        reduced = tuple(collectives.reduce_scalars(values, op, group, cpu) for op in ops)
        return *reduced, collectives.reduce_scalars({}, dist.ReduceOp.SUM, group, cpu)

    for total, high, low, nothing in run_ranks(reduce, 3, timeout=60):
        assert total == pytest.approx({"loss": 0.6, "tokens": 3 * 2.0**40 + 3}, rel=1e-15)
        assert high == pytest.approx({"loss": 0.3, "tokens": 2.0**40 + 2}, rel=1e-15)
        assert low == pytest.approx({"loss": 0.1, "tokens": 2.0**40}, rel=1e-15)
        assert list(total) == ["loss", "tokens"] and nothing == {}


@pytest.mark.parametrize("source", [0, 2])
def test_share_object_and_broadcast_tensors_come_from_the_source(source: int) -> None:
    def share(rank: int, world_size: int) -> tuple[dict[str, int], list[float]]:
        tensors = [torch.full((2,), float(rank)), torch.full((), rank + 0.5)]
        collectives.broadcast_tensors(iter(tensors), source, dist.group.WORLD)
        value = collectives.share_object({"rank": rank}, dist.group.WORLD, source)
        return value, [*tensors[0].tolist(), tensors[1].item()]

    expected = {"rank": source}, [float(source), float(source), source + 0.5]
    assert run_ranks(share, 3, timeout=60) == [expected] * 3


def test_broadcast_uses_global_ranks_in_a_subgroup() -> None:
    """The group is ranks 1 and 2: rank 2 is its second member and the source."""

    def broadcast(rank: int, world_size: int) -> float:
        group = dist.new_group([1, 2])
        tensor = torch.tensor(float(rank))
        if rank > 0:
            collectives.broadcast_tensors([tensor], 2, group)
        return tensor.item()

    assert run_ranks(broadcast, 3, timeout=60) == [0.0, 2.0, 2.0]


def test_init_distributed_describes_the_process() -> None:
    """Joins the group that exists; starting one from torchrun's environment is not covered."""

    def join(rank: int, world_size: int) -> collectives.Process:
        return collectives.init_distributed(timeout_minutes=1.0)

    for rank, process in enumerate(run_ranks(join, 2, timeout=60)):
        assert process == collectives.Process(rank, 2, rank, 2, torch.device("cpu"))


def test_attempts_of_a_restarted_job_do_not_see_each_other() -> None:
    """One store, three attempts in a row, the ranks of each arriving in another order."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def attempt(delays: tuple[float, ...]) -> list[tuple[bool, list[bytes]]]:
        def be(rank: int) -> tuple[bool, list[bytes]]:
            time.sleep(delays[rank])
            client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
            store = collectives.meet(client, rank, 3, timedelta(seconds=20))
            is_new = not store.check(["old"])
            store.set(f"address/{rank}", f"{delays} {rank}")
            addresses = [store.get(f"address/{peer}") for peer in range(3)]
            store.set("old", "")
            return is_new or rank > 0, addresses  # a quick peer may have written it already

        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(be, range(3)))

    for delays in ((0.0, 0.0, 0.0), (0.3, 0.0, 0.1), (0.0, 0.3, 0.1)):
        assert attempt(delays) == [(True, [f"{delays} {peer}".encode() for peer in range(3)])] * 3


def test_a_rank_that_never_comes_is_named() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not come"):
        collectives.meet(server, 0, 3, timedelta(seconds=0.2))
