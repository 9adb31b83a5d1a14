# SPDX-License-Identifier: Apache-2.0
"""The launcher of the multi-rank tests: results, failures, deaths and hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks


@dataclass
class Shard:
    """A result with a tensor inside."""

    rank: int
    tensor: torch.Tensor


@pytest.fixture(autouse=True)
def _no_child_survives():
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_reduce_reaches_every_rank(world_size: int) -> None:
    def add(rank: int, size: int, offset: int) -> int:
        total = torch.tensor(rank + offset)
        dist.all_reduce(total)
        assert size == dist.get_world_size() and rank == dist.get_rank()
        return int(total)

    expected = sum(rank + 10 for rank in range(world_size))
    assert run_ranks(add, world_size, 10) == [expected] * world_size


def test_results_with_tensors_come_back_by_rank_and_value() -> None:
    """Covers tensors inside containers and dataclasses; not tensor subclasses or CUDA tensors."""

    def make(rank: int, world_size: int) -> tuple[Shard, dict[str, object]]:
        shard = Shard(rank, torch.arange(3, dtype=torch.bfloat16) + rank)
        return shard, {"view": torch.eye(3)[rank], "parameter": torch.nn.Parameter(torch.ones(2))}

    for rank, (shard, extra) in enumerate(run_ranks(make, 2)):
        assert shard.rank == rank
        assert torch.equal(shard.tensor, torch.arange(3, dtype=torch.bfloat16) + rank)
        assert torch.equal(extra["view"], torch.eye(3)[rank])
        assert extra["parameter"].requires_grad
        shard.tensor += 1  # owned by the parent: the memory outlives the child


def test_ranks_see_the_variables_of_torchrun() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.get(name) for name in names}

    def read(rank: int, world_size: int) -> tuple[list[str], int, int]:
        return [os.environ[name] for name in names], torch.get_num_threads(), torch.initial_seed()

    (first, *settings), (second, *_) = run_ranks(read, 2)
    assert first[:5] == ["0", "0", "2", "2", "127.0.0.1"] and second[:4] == ["1", "1", "2", "2"]
    assert first[5] == second[5] and 0 < int(first[5]) < 65536
    assert settings == [1, 0]
    assert before == {name: os.environ.get(name) for name in names}


def test_autograd_works_in_ranks_after_it_ran_in_the_parent() -> None:
    """Covers CPU builds of torch only: with a CUDA device autograd starts threads that a fork loses."""
    if torch.cuda.is_available():
        pytest.skip("autograd of a CUDA build does not survive a fork once it has run")
    weight = torch.ones(64, 64, requires_grad=True)
    (weight @ weight).sum().backward()

    def differentiate(rank: int, world_size: int) -> torch.Tensor:
        local = torch.ones(64, 64, requires_grad=True)
        (local @ local).sum().backward()
        return local.grad

    assert all(torch.equal(gradient, weight.grad) for gradient in run_ranks(differentiate, 2))


def test_one_failing_rank_ends_the_others() -> None:
    """The other ranks wait in a collective that cannot complete; the message starts with the cause."""

    def fail(rank: int, world_size: int) -> None:
        if rank == 2:
            raise ValueError("the box [0, 4) is written twice")
        dist.barrier()

    with pytest.raises(AssertionError, match="the first of them first") as caught:
        run_ranks(fail, 4)
    message = str(caught.value)
    assert "ValueError: the box [0, 4) is written twice" in message and ", in fail" in message
    assert message.index("rank 2 raised") == message.index("rank ")


def test_all_failing_ranks_are_reported() -> None:
    def fail(rank: int, world_size: int) -> None:
        raise KeyError(f"parameter of rank {rank}")

    with pytest.raises(AssertionError, match="3 of 3 ranks failed") as caught:
        run_ranks(fail, 3)
    assert all(f"parameter of rank {rank}" in str(caught.value) for rank in range(3))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_rank_killed_by_a_signal_is_named(name: str) -> None:
    def die(rank: int, world_size: int) -> None:
        if rank == 1:
            if name == "SIGSEGV":  # a library that the parent imported may have a handler that returns
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), getattr(signal, name))
        dist.barrier()

    with pytest.raises(AssertionError, match=f"rank 1 was killed by {name}"):
        run_ranks(die, 2)


def test_a_rank_that_exits_is_named() -> None:
    """Covers both ways out: the exception of sys.exit, and os._exit, which nothing can catch."""

    def leave(rank: int, world_size: int) -> None:
        dist.barrier()  # both are connected: a rank that leaves earlier makes the other fail in its start
        if rank == 0:
            os._exit(3)
        raise SystemExit(4)

    with pytest.raises(AssertionError, match=r"rank 0 exited \(exit code 3\)") as caught:
        run_ranks(leave, 2)
    assert "SystemExit: 4" in str(caught.value)


def test_a_rank_that_leaves_late_is_reported_within_the_grace() -> None:
    """Rank 0 of a run stays for a second after the others, for it may keep the store that they still read."""

    def leave(rank: int, world_size: int) -> None:
        dist.barrier()
        time.sleep(1.5 if rank == 0 else 0.0)
        os._exit(2)

    with pytest.raises(AssertionError, match="2 of 2 ranks failed") as caught:
        run_ranks(leave, 2, grace=30.0)
    assert "rank 0 exited (exit code 2)" in str(caught.value)


def test_a_hang_shows_the_stack_of_every_rank() -> None:
    """One rank waits in Python, the other in gloo's C++. Not covered: a rank that the kernel does not wake."""

    def wait_for_ever(rank: int, world_size: int) -> None:
        if rank == 0:
            threading.Event().wait()
        dist.barrier()

    with pytest.raises(AssertionError, match="not all of 2 ranks were done after 1.5 s") as caught:
        run_ranks(wait_for_ever, 2, timeout=1.5)
    message = str(caught.value)
    assert message.count("in wait_for_ever") == 2
    assert "in barrier" in message and "in wait" in message


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="rank 0 raised"):
        run_ranks(lambda rank, world_size: threading.Lock(), 1)


def test_a_parent_with_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(AssertionError, match="destroy it first"):
        run_ranks(lambda rank, world_size: None, 1)
