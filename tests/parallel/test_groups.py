# SPDX-License-Identifier: Apache-2.0
"""Process groups of a role: who is in which, what megatron-core gets, and that they carry messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.parallel.groups import build_groups, list_partitions
from megatron_rl.parallel.layout import ParallelLayout

OURS = ("world", "tp", "pp", "cp", "dp", "tp_pp", "dp_cp")
MEGATRONS = ("tp", "pp", "cp", "dp", "mp", "dp_cp", "tp_cp", "embd", "pos_embd", "ep", "expt_tp",
             "tp_ep", "tp_ep_pp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "intra_dist_opt")


def describe(rank: int, world_size: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Members of every group of this rank, by name."""
    groups = build_groups(ParallelLayout(world_size, **sizes))

    def members(group: dist.ProcessGroup | None) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    found: dict[str, Any] = {name: members(getattr(groups, name)) for name in OURS}
    found["collection"] = {name: members(getattr(groups.collection, name)) for name in MEGATRONS}
    found["num_made"] = len(dist.distributed_c10d._world.pg_names) - 1  # besides the default group
    found["stage"] = groups.is_first_stage, groups.is_last_stage, groups.last_stage_rank
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=groups.pp)
    found["sum_over_pp"] = total.item()
    return found


def test_tp2_pp2() -> None:
    found = run_ranks(describe, 4, dict(tp_size=2, pp_size=2), timeout=60)
    expected_tp = [[0, 1], [0, 1], [2, 3], [2, 3]]
    expected_pp = [[0, 2], [1, 3], [0, 2], [1, 3]]
    for rank, of in enumerate(found):
        assert of["world"] == of["tp_pp"] == of["collection"]["mp"] == [0, 1, 2, 3]
        assert of["tp"] == of["collection"]["tp"] == expected_tp[rank]
        assert of["pp"] == of["collection"]["pp"] == of["collection"]["embd"] == expected_pp[rank]
        assert of["dp"] == of["cp"] == of["dp_cp"] == of["collection"]["ep"] == [rank]
        assert of["collection"]["intra_dist_opt"] == [0, 1, 2, 3]
        assert of["sum_over_pp"] == sum(expected_pp[rank])
        assert of["num_made"] == 3, "tp, pp, and the rank alone"
    assert [of["stage"] for of in found] == [
        (True, False, 2), (True, False, 3), (False, True, 2), (False, True, 3)]


@pytest.mark.parametrize("world_size", [64, 512, 4096])
@pytest.mark.parametrize(("sizes", "most"), [
    ({}, 2), (dict(tp_size=8), 4), (dict(tp_size=8, pp_size=4), 7), (dict(tp_size=4, ep_size=8), 7),
    (dict(tp_size=4, pp_size=2, cp_size=2, ep_size=4), 12)])
def test_a_layout_needs_a_handful_of_groups_on_any_number_of_ranks(
    sizes: dict[str, int], most: int, world_size: int
) -> None:
    """The groups of one rank; and each rank is in one of each kind, so that nobody waits for ranks outside of it."""
    partitions = list_partitions(ParallelLayout(world_size, **sizes))
    assert len({str(rank_lists) for rank_lists in partitions.values()}) <= most
    for name, rank_lists in partitions.items():
        ranks = [rank for ranks in rank_lists for rank in ranks]
        assert len(ranks) == len(set(ranks)) and (name == "embd" or len(ranks) == world_size)


def _start_on_a_gpu(rank: int, world_size: int) -> dict[str, Any]:
    started: dict[str, Any] = {}
    torch.cuda.is_available, torch.cuda.set_device = lambda: True, lambda device: None  # in this fork only
    dist.destroy_process_group()
    start = dist.init_process_group

    def note(backend: str, **options: Any) -> None:
        started.update(backend=backend, names=sorted(options))
        start("gloo", **{name: value for name, value in options.items() if name != "device_id"})

    dist.init_process_group = note
    init_distributed(timeout_minutes=1.0)
    return started


def test_no_device_is_bound_to_the_default_group() -> None:
    """With one, each new group is a collective of the whole world. NCCL itself is not started here."""
    assert run_ranks(_start_on_a_gpu, 1, timeout=60) == [
        dict(backend="cpu:gloo,cuda:nccl", names=["rank", "store", "timeout", "world_size"])]


def test_middle_stages_are_in_no_embedding_group() -> None:
    found = run_ranks(describe, 4, dict(pp_size=4), timeout=60)
    assert [of["collection"]["embd"] for of in found] == [[0, 3], None, None, [0, 3]]
    assert [of["stage"] for of in found] == [
        (True, False, 3), (False, False, 3), (False, False, 3), (False, True, 3)]
    assert {tuple(of["pp"]) for of in found} == {(0, 1, 2, 3)}


def test_data_and_context_parallel_ranks_hold_the_same_parameters() -> None:
    found = run_ranks(describe, 4, dict(cp_size=2), timeout=60)
    assert [of["cp"] for of in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [of["dp"] for of in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for rank, of in enumerate(found):
        assert of["dp_cp"] == of["collection"]["dp_cp"] == of["collection"]["intra_dp_cp"] == [0, 1, 2, 3]
        assert of["tp"] == of["pp"] == of["tp_pp"] == of["collection"]["embd"] == [rank]
        assert of["stage"] == (True, True, rank)


def test_expert_parallel_ranks_come_from_data_parallelism() -> None:
    """Dense groups do not know of experts; two replicas of each expert reduce their gradients."""
    found = run_ranks(describe, 8, dict(tp_size=2, ep_size=2), timeout=60)
    assert [of["dp"] for of in found] == [[0, 2, 4, 6], [1, 3, 5, 7]] * 4
    megatrons = [of["collection"] for of in found]
    assert [of["ep"] for of in megatrons] == [[0, 2], [1, 3]] * 2 + [[4, 6], [5, 7]] * 2
    assert [of["expt_tp"] for of in megatrons] == [of["tp"] for of in megatrons]
    assert [of["expt_dp"] for of in megatrons] == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2
    for rank, of in enumerate(megatrons):
        assert of["tp_ep"] == of["tp_ep_pp"] == list(range(rank // 4 * 4, rank // 4 * 4 + 4))
        assert of["intra_expt_dp"] == of["expt_dp"] and of["intra_dp_cp"] == of["dp_cp"]


@pytest.mark.parametrize("sizes", [dict(tp_size=2), dict(pp_size=2)])
def test_two_roles_with_other_layouts_share_a_process(sizes: dict[str, int]) -> None:
    """The second layout neither replaces nor meets the groups of the first; global state stays unset."""

    def build(rank: int, world_size: int) -> tuple[list[int], list[int], bool]:
        first = build_groups(ParallelLayout(world_size, **sizes))
        second = build_groups(ParallelLayout(world_size))
        from megatron.core import parallel_state

        axis = "tp" if "tp_size" in sizes else "pp"
        ranks = dist.get_process_group_ranks(getattr(first, axis))
        return ranks, dist.get_process_group_ranks(second.dp), parallel_state.model_parallel_is_initialized()

    assert run_ranks(build, 2, timeout=60) == [([0, 1], [0, 1], False)] * 2
