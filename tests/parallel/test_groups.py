# SPDX-License-Identifier: Apache-2.0
"""Process groups of a role: their members, megatron-core's view of them, and messages through them."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.parallel.collectives import align_group_names, init_distributed
from megatron_rl.parallel.groups import build_groups, list_groups
from megatron_rl.parallel.layout import ParallelLayout

OURS = ("world", "tp", "pp", "cp", "dp")
MEGATRONS = (
    "tp",
    "pp",
    "cp",
    "dp",
    "mp",
    "dp_cp",
    "tp_cp",
    "embd",
    "pos_embd",
    "ep",
    "expt_tp",
    "tp_ep",
    "tp_ep_pp",
    "expt_dp",
    "intra_dp_cp",
    "intra_expt_dp",
    "intra_dist_opt",
)


def describe(rank: int, world_size: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Members of every group of this rank, by name."""
    groups = build_groups(ParallelLayout(world_size, **sizes))

    def members(group: dist.ProcessGroup | None) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    found: dict[str, Any] = {name: members(getattr(groups, name)) for name in OURS}
    found["collection"] = {name: members(getattr(groups.collection, name)) for name in MEGATRONS}
    found["num_made"] = len(dist.distributed_c10d._world.pg_names) - 1  # besides the default group
    found["stage"] = groups.at.pp == 0, groups.is_last_stage, groups.last_stage_rank
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=groups.pp)
    found["sum_over_pp"] = total.item()
    return found


def test_tp2_pp2() -> None:
    found = run_ranks(describe, 4, dict(tp_size=2, pp_size=2), timeout=60)
    expected_tp = [[0, 1], [0, 1], [2, 3], [2, 3]]
    expected_pp = [[0, 2], [1, 3], [0, 2], [1, 3]]
    for rank, of in enumerate(found):
        assert of["world"] == of["collection"]["mp"] == [0, 1, 2, 3]
        assert of["tp"] == of["collection"]["tp"] == expected_tp[rank]
        assert of["pp"] == of["collection"]["pp"] == of["collection"]["embd"] == expected_pp[rank]
        assert of["dp"] == of["cp"] == of["collection"]["dp_cp"] == of["collection"]["ep"] == [rank]
        assert of["collection"]["intra_dist_opt"] == [0, 1, 2, 3]
        assert of["sum_over_pp"] == sum(expected_pp[rank])
        assert of["num_made"] == 3, "tp, pp, and the rank alone"
    assert [of["stage"] for of in found] == [(True, False, 2), (True, False, 3), (False, True, 2), (False, True, 3)]


@pytest.mark.parametrize("world_size", [64, 512, 4096])
@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ({}, 2),
        (dict(tp_size=8), 4),
        (dict(tp_size=8, pp_size=4), 7),
        (dict(tp_size=4, ep_size=8), 7),
        (dict(tp_size=4, pp_size=2, cp_size=2, ep_size=4), 12),
    ],
)
def test_a_layout_needs_a_handful_of_groups_on_any_number_of_ranks(
    sizes: dict[str, int], most: int, world_size: int
) -> None:
    """Each rank is in one group of each name, and names with the same groups on one rank have the same on all."""
    layout = ParallelLayout(world_size, **sizes)
    alike = None
    for rank in (0, 1, world_size // 2 + 3, world_size - 1):
        groups = list_groups(layout, rank)
        assert len({tuple(ranks) for ranks in groups.values()}) <= most
        assert all(rank in ranks or name == "embd" for name, ranks in groups.items())
        assert all(ranks == list_groups(layout, ranks[-1])[name] for name, ranks in groups.items())
        pairs = {(a, b) for a in groups for b in groups if groups[a] == groups[b]}
        assert pairs == (alike := alike or pairs)


def _count_calls(rank: int, world_size: int, sizes: dict[str, int]) -> int:
    """How often this rank creates a group."""
    asked: list[list[int]] = []
    create = dist.new_group
    dist.new_group = lambda ranks, **options: (asked.append(ranks), create(ranks, **options))[1]
    build_groups(ParallelLayout(world_size, **sizes))
    return len(asked)


def test_a_rank_creates_as_many_groups_in_a_larger_world() -> None:
    """More replicas are no more calls."""
    for sizes in (dict(tp_size=2), dict(pp_size=2)):
        calls = [set(run_ranks(_count_calls, world_size, sizes, timeout=60)) for world_size in (4, 8)]
        assert calls == [{3}, {3}], sizes  # one axis, the other, and the rank alone


def _build_apart(rank: int, world_size: int) -> tuple[list[list[int]], int, list[float]]:
    """Two roles on ranks of their own, one after the other, as `build_roles` makes them; groups of this rank's role."""
    found = []
    for layout in (ParallelLayout(2, tp_size=2), ParallelLayout(4, pp_size=2, first_rank=2)):
        if rank in layout.ranks:
            groups = build_groups(layout)
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=groups.world)
            collection = groups.collection
            members = (groups.world, collection.intra_dist_opt, groups.tp, groups.pp, groups.dp)
            found = [dist.get_process_group_ranks(group) for group in members], groups.last_stage_rank, total.item()
        else:
            align_group_names()
    return found


def test_roles_on_ranks_of_their_own() -> None:
    """Groups hold ranks of the job, and both roles are built without waiting for the other's ranks in a circle."""
    found = run_ranks(_build_apart, 6, timeout=60)
    assert found[0] == ([[0, 1], [0, 1], [0, 1], [0], [0]], 0, 1.0)
    assert found[1] == ([[0, 1], [0, 1], [0, 1], [1], [1]], 1, 1.0)
    whole = [2, 3, 4, 5]
    assert found[2] == ([whole, whole, [2], [2, 4], [2, 3]], 4, 14.0)
    assert found[5] == ([whole, whole, [5], [3, 5], [4, 5]], 5, 14.0)


def _build_after_others(rank: int, world_size: int) -> list[list[int]]:
    """Groups of a layout after some ranks have made groups of their own, and after one whose ends have one more."""
    dist.new_group([1, 2], use_local_synchronization=True)
    dist.new_group([2, 3])
    build_groups(ParallelLayout(world_size, pp_size=4))
    groups = build_groups(ParallelLayout(world_size, tp_size=2, pp_size=2))
    total = torch.tensor(rank)
    dist.all_reduce(total, group=groups.tp)
    return [dist.get_process_group_ranks(groups.tp), dist.get_process_group_ranks(groups.pp), [int(total)]]


def test_members_name_a_group_alike_whatever_groups_they_made_before() -> None:
    """gloo; NCCL finds its peers through the same names in the same store, which is not run here."""
    found = run_ranks(_build_after_others, 4, timeout=60)
    assert found == [[[0, 1], [0, 2], [1]], [[0, 1], [1, 3], [1]], [[2, 3], [0, 2], [5]], [[2, 3], [1, 3], [5]]]


_LAYOUTS_OF_8 = [
    ParallelLayout(8, **dict(zip(("tp_size", "pp_size", "cp_size", "ep_size"), sizes, strict=True)))
    for sizes in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8))
    if 8 % (sizes[0] * sizes[1] * sizes[2]) == 0 and 8 // (sizes[0] * sizes[1]) % sizes[3] == 0
]


def _build_all(rank: int, world_size: int, layouts: list[ParallelLayout]) -> list[dict[str, Any]]:
    """Members of every group of every layout, and the sum of the ranks in each."""
    reports = []
    for layout in layouts:
        collection, report = build_groups(layout).collection, {}
        for name in list_groups(layout, rank):
            group = getattr(collection, "mp" if name == "tp_pp" else name)
            if group is not None:
                total = torch.tensor(rank)
                dist.all_reduce(total, group=group)
                report[name] = dist.get_process_group_ranks(group), int(total)
        reports.append(report)
    return reports


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2))])
def test_all_layouts_of_8_ranks_in_one_process(part: int) -> None:
    """The members are those that coordinates give rank by rank, and messages arrive at them and nobody else."""
    assert len(_LAYOUTS_OF_8) > 40
    layouts = _LAYOUTS_OF_8[part::3]
    for rank, reports in enumerate(run_ranks(_build_all, 8, layouts, timeout=170)):
        for layout, report in zip(layouts, reports, strict=True):
            expected = list_by_coordinates(layout, rank)
            assert report == {name: (ranks, sum(ranks)) for name, ranks in expected.items()}, (layout, rank)


def list_by_coordinates(layout: ParallelLayout, rank: int) -> dict[str, list[int]]:
    """The groups of a rank, from a walk over all ranks."""
    found = {}
    for coordinates, names in (
        (layout.coordinates, {name: name.split("_") for name in ("tp", "pp", "cp", "dp", "tp_pp", "dp_cp", "tp_cp")}),
        (
            layout.expert_coordinates,
            {"ep": ["ep"], "expt_tp": ["tp"], "expt_dp": ["dp"], "tp_ep": ["tp", "ep"], "tp_ep_pp": ["tp", "ep", "pp"]},
        ),
    ):
        at = asdict(coordinates(rank))
        for name, free in names.items():
            found[name] = [
                other
                for other in range(layout.world_size)
                if all(place == at[axis] for axis, place in asdict(coordinates(other)).items() if axis not in free)
            ]
    found |= {f"intra_{name}": found[name] for name in ("dp_cp", "expt_dp")}
    if layout.coordinates(rank).pp in (0, layout.pp_size - 1):
        found["embd"] = sorted({found["pp"][0], found["pp"][-1]})
    return found


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
        dict(backend="cpu:gloo,cuda:nccl", names=["rank", "store", "timeout", "world_size"])
    ]


def test_middle_stages_are_in_no_embedding_group() -> None:
    found = run_ranks(describe, 4, dict(pp_size=4), timeout=60)
    assert [of["collection"]["embd"] for of in found] == [[0, 3], None, None, [0, 3]]
    assert [of["stage"] for of in found] == [(True, False, 3), (False, False, 3), (False, False, 3), (False, True, 3)]
    assert {tuple(of["pp"]) for of in found} == {(0, 1, 2, 3)}


def test_data_and_context_parallel_ranks_hold_the_same_parameters() -> None:
    found = run_ranks(describe, 4, dict(cp_size=2), timeout=60)
    assert [of["cp"] for of in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [of["dp"] for of in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for rank, of in enumerate(found):
        assert of["collection"]["dp_cp"] == of["collection"]["intra_dp_cp"] == [0, 1, 2, 3]
        assert of["tp"] == of["pp"] == of["collection"]["mp"] == of["collection"]["embd"] == [rank]
        assert of["stage"] == (True, True, rank)


def test_expert_parallel_ranks_come_from_data_parallelism() -> None:
    """Dense groups ignore experts; two replicas of each expert reduce their gradients."""
    found = run_ranks(describe, 8, dict(tp_size=2, ep_size=2), timeout=60)
    assert [of["dp"] for of in found] == [[0, 2, 4, 6], [1, 3, 5, 7]] * 4
    megatrons = [of["collection"] for of in found]
    assert [of["ep"] for of in megatrons] == [[0, 2], [1, 3]] * 2 + [[4, 6], [5, 7]] * 2
    assert [of["expt_tp"] for of in megatrons] == [of["tp"] for of in megatrons]
    assert [of["expt_dp"] for of in megatrons] == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2
    for rank, of in enumerate(megatrons):
        assert of["tp_ep"] == of["tp_ep_pp"] == list(range(rank // 4 * 4, rank // 4 * 4 + 4))
        assert of["intra_expt_dp"] == of["expt_dp"] and of["intra_dp_cp"] == of["dp_cp"]


@pytest.mark.parametrize(
    ("sizes", "shards", "replicas"),
    [
        (dict(tp_size=2, shard_size=2), [[0, 2], [0, 2]], [[0, 4], [0, 4]]),
        (dict(cp_size=2, shard_size=4), [[0, 1, 2, 3], [0, 1, 2, 3]], [[0, 4], [0, 4]]),
        (dict(ep_size=2, shard_size=4), [[0, 1, 2, 3], [0, 2]], [[0, 4], [0, 4]]),
        (dict(ep_size=4, shard_size=4), [[0, 1, 2, 3], [0]], [[0, 4], [0, 4]]),
        (dict(ep_size=8, shard_size=4), [[0, 1, 2, 3], [0]], [[0, 4], [0]]),
    ],
)
def test_shards_have_replicas_in_other_groups(
    sizes: dict[str, int], shards: list[list[int]], replicas: list[list[int]]
) -> None:
    """Dense parameters and experts: groups of a name are disjoint, and every rank lists the same ones."""
    layout = ParallelLayout(8, **sizes)
    groups = [list_groups(layout, rank) for rank in range(8)]
    assert [groups[0][f"intra_{name}"] for name in ("dp_cp", "expt_dp")] == shards
    assert [groups[0][f"inter_{name}"] for name in ("dp_cp", "expt_dp")] == replicas
    for name in ("dp_cp", "expt_dp"):
        for rank, of in enumerate(groups):
            intra, inter = of[f"intra_{name}"], of[f"inter_{name}"]
            assert {*intra} & {*inter} == {rank} and len(intra) * len(inter) == len(of[name])
            assert all(groups[other][f"intra_{name}"] == intra for other in intra)
            assert all(groups[other][f"inter_{name}"] == inter for other in inter)


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
