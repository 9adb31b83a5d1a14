# SPDX-License-Identifier: Apache-2.0
"""Plans between any two sets of holders, checked from both sides, and their execution on gloo.

Not covered: NCCL, with which the same all-to-all runs on the devices.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.samples.table import FetchPlan, Holders, fetch, plan_fetch


def draw_holders(rng: np.random.Generator, num_sequences: int, world_size: int, width: int) -> Holders:
    """Return replicas of neighboring ranks, as in an engine or a role."""
    ranks = np.arange(world_size).reshape(-1, width)
    return Holders(rng.integers(0, len(ranks), num_sequences), ranks)


def strided(rng: np.random.Generator, num_sequences: int, world_size: int, width: int) -> Holders:
    """Return replicas of distant ranks, as in a role with pipeline stages."""
    ranks = np.arange(world_size).reshape(width, -1).T
    return Holders(rng.integers(0, len(ranks), num_sequences), ranks)


def list_held(holders: Holders, rank: int) -> set[int]:
    return {i for i, replica in enumerate(holders.replica_of) if replica >= 0 and rank in holders.ranks[replica]}


@pytest.mark.parametrize("seed", range(8))
def test_both_sides_agree_and_nothing_is_sent_that_is_there(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = draw_holders(rng, 40, 8, int(rng.choice([1, 2, 4])))
    for destination in (
        strided(rng, 40, 8, int(rng.choice([1, 2, 4, 8]))),
        Holders(np.where(rng.random(40) < 0.3, 0, -1), np.array([[3]])),
        Holders(np.zeros(40, int), np.arange(8)[None]),
        source,
    ):
        plans = [plan_fetch(rank, source, destination) for rank in range(8)]
        for rank, plan in enumerate(plans):
            needs, has = list_held(destination, rank), list_held(source, rank)
            assert sorted(plan.sequences.tolist()) == sorted(needs)
            assert set(plan.kept.tolist()) == needs & has
            for peer in range(8):
                sent = plans[peer].sends.get(rank, np.zeros(0))
                assert plan.receives.get(peer, np.zeros(0)).tolist() == sent.tolist() == sorted(sent)
                assert set(sent.tolist()) <= list_held(source, peer)
    assert all(not plan.sends and not plan.receives for plan in plans), "equal holders exchange nothing"


def test_the_ranks_of_a_replica_share_the_work() -> None:
    """An engine of eight ranks gives 800 sequences to eight engines of one: each of its ranks sends about an eighth."""
    source = Holders(np.zeros(800, np.int64), np.arange(8)[None])
    destination = Holders(np.arange(800) % 8, 8 + np.arange(8)[:, None])
    loads = [sum(map(len, plan_fetch(rank, source, destination).sends.values())) for rank in range(8)]
    assert loads == [100] * 8


def test_a_plan_at_scale_takes_no_time() -> None:
    """8192 sequences from 128 engines of TP 8 to 64 replicas of 16 ranks; the bound is of the order of magnitude."""
    rng = np.random.default_rng(0)
    source, destination = draw_holders(rng, 8192, 1024, 8), strided(rng, 8192, 1024, 16)
    start = time.perf_counter()
    plans: list[FetchPlan] = [plan_fetch(rank, source, destination) for rank in range(0, 1024, 64)]
    seconds = (time.perf_counter() - start) / len(plans)
    print(f"one rank's plan: {1000 * seconds:.2f} ms")
    assert seconds < 0.5 and sum(len(plan.sequences) for plan in plans) > 1000


LENGTHS = np.array([3, 0, 5, 2, 4, 1, 2, 6])


def _values(sequences: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    places = [(10 * i + p, p % 2 == 0) for i in sequences.tolist() for p in range(LENGTHS[i])]
    return torch.tensor([float(x) for x, _ in places]), torch.tensor([flag for _, flag in places], dtype=torch.bool)


def _fetch(rank: int, world_size: int) -> list[tuple[int, int]]:
    source = Holders(np.arange(8) % 2, np.array([[0, 1], [2, 3]]))
    received = []
    for destination in (
        Holders(np.arange(8) // 2, np.arange(4)[:, None]),
        Holders(np.where(np.arange(8) < 5, 0, -1), np.array([[2]])),
        Holders(np.zeros(8, int), np.arange(4)[None]),
    ):

        def read(name: str, sequences: np.ndarray) -> torch.Tensor:
            assert set(sequences.tolist()) <= list_held(source, rank)
            return _values(sequences)[0 if name == "number" else 1]

        plan = plan_fetch(rank, source, destination)
        found = fetch(plan, LENGTHS, {"number": torch.float32, "flag": torch.bool}, read, dist.group.WORLD)
        number, flag = _values(found.sequences)
        assert torch.equal(found.columns["number"], number) and torch.equal(found.columns["flag"], flag)
        new = [i for sequences in plan.receives.values() for i in sequences.tolist()]
        received.append((found.num_bytes, int(5 * LENGTHS[new].sum())))
    return received


def test_values_arrive_and_their_bytes_are_counted() -> None:
    found = run_ranks(_fetch, 4)
    assert all(counted == expected for rank in found for counted, expected in rank)
    assert [rank[1][0] for rank in found] == [0, 0, 5 * (3 + 5 + 4), 0], "the writer has sequences 1 and 3 already"
