# SPDX-License-Identifier: Apache-2.0
"""Pairs against gloo, bit for bit; messages one way; a rank that is gone or late. Not: hosts that cannot map."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.parallel import collectives, pairs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pairs are for machines without CUDA")


def draw(rank: int, dtype: torch.dtype, rows: int = 6) -> torch.Tensor:
    """Different values on each rank, not contiguous."""
    values = torch.rand(5, rows, generator=torch.Generator().manual_seed(rank)) - 0.5
    return values.t().to(dtype) if dtype.is_floating_point else (values.t() * 1000).to(dtype)


def open_world(timeout: float = 20.0) -> tuple[dist.ProcessGroup, pairs.Pair]:
    """The pair of two ranks."""
    group = collectives.world()
    pairs.open_pair(group, timedelta(seconds=timeout))
    pair = collectives.find_pair(group, 1000)
    assert pair is not None
    return group, pair


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_collectives_have_the_bits_of_gloo(dtype: torch.dtype) -> None:
    """All-gather, reduce-scatter and all-reduce, several times in turn, asynchronous ones too; gloo's come first."""

    def collect(rank: int, world_size: int) -> list[torch.Tensor]:
        values, found = draw(rank, dtype), []
        for module in (dist, pairs):
            if module is pairs:
                open_world()
            group = collectives.world()
            for is_async in (False, True, False):
                gathered, scattered, reduced = values.new_empty(12, 5), values.new_empty(3, 5), values.contiguous()
                works = [
                    module.all_gather_into_tensor(gathered, values.contiguous(), group=group, async_op=is_async),
                    module.reduce_scatter_tensor(scattered, values.contiguous(), group=group, async_op=is_async),
                    module.all_reduce(reduced, group=group, async_op=is_async),
                ]
                for work in works:
                    assert (work is not None) == is_async
                    if work is not None:
                        work.wait()
                found += [gathered, scattered, reduced]
        return found

    for rank, found in enumerate(run_ranks(collect, 2, timeout=60)):
        both = draw(0, dtype), draw(1, dtype)
        expected = torch.cat(both), sum(both)[3 * rank : 3 * rank + 3], sum(both)
        for index, values in enumerate(found):
            assert torch.equal(values, expected[index % 3]), index


def test_messages_one_way_and_both_ways_keep_their_order() -> None:
    """More in a row than there are slots, on one rank only while the other is late; then collectives between them."""

    def exchange(rank: int, world_size: int) -> list[float]:
        group, _ = open_world()
        found = []
        for number in range(300):
            values = torch.full((4,), float(number))
            if number % 7 == 0:
                total = torch.full((3,), float(rank + number))
                pairs.all_reduce(total, group=group)
                found.append(total[0].item())
            if number == 40 and rank == 1:
                time.sleep(0.2)
            received = values if rank == 0 else torch.zeros(4)
            collectives.broadcast_tensors([received], 0, group)
            found.append(received.sum().item())
        return found

    expected = [x for n in range(300) for x in ([2.0 * n + 1] if n % 7 == 0 else []) + [4.0 * n]]
    assert run_ranks(exchange, 2, timeout=60) == [expected] * 2


def test_what_does_not_fit_goes_to_gloo() -> None:
    """A tensor larger than a slot, another operation than a sum, three ranks."""

    def reduce(rank: int, world_size: int) -> list[Any]:
        group = collectives.world()
        pairs.open_pair(group, None)
        large = torch.full((pairs._SLOT_BYTES // 4 + 1,), float(rank))
        high = torch.tensor(float(rank))
        pairs.all_reduce(large, group=group)
        pairs.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        return [collectives.find_pair(group, 1) is None, large[-1].item(), high.item()]

    assert run_ranks(reduce, 2, timeout=60) == [[False, 1.0, 1.0]] * 2
    assert run_ranks(reduce, 3, timeout=60) == [[True, 3.0, 2.0]] * 3


def test_a_rank_that_is_gone_is_noticed_at_once() -> None:
    def wait(rank: int, world_size: int) -> str:
        _, pair = open_world(timeout=60)
        if rank == 1:
            os._exit(1)
        with pytest.raises(RuntimeError) as caught:
            pair.take(torch.zeros(1))
        return str(caught.value)

    (found, _) = run_ranks(wait, 2, timeout=30, dying=(1,))
    assert found.startswith("Connection closed by peer")


def test_a_late_rank_ends_the_wait() -> None:
    def wait(rank: int, world_size: int) -> str:
        _, pair = open_world(timeout=0.1)
        if rank == 1:
            time.sleep(1)
            return ""
        with pytest.raises(RuntimeError) as caught:
            pair.take(torch.zeros(1))
        return str(caught.value)

    assert run_ranks(wait, 2, timeout=30)[0].startswith("Timed out waiting 100ms for")
