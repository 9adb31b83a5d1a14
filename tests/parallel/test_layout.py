# SPDX-License-Identifier: Apache-2.0
"""ParallelLayout: coordinates, numbering and refused sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.parallel.layout import Coordinates, ExpertCoordinates, ParallelLayout
from megatron_rl.types import UserError

AXES = ("tp", "cp", "dp", "pp")


def list_groups(layout: ParallelLayout, *axes: str, of_experts: bool = False) -> list[list[int]]:
    """The groups of all ranks, each once."""
    group_of = layout.expert_group_of if of_experts else layout.group_of
    return [list(ranks) for ranks in dict.fromkeys(tuple(group_of(rank, *axes)) for rank in range(layout.world_size))]


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    """Any layout of up to 192 ranks."""
    tp, cp, dp, pp = (draw(st.integers(1, top)) for top in (4, 3, 4, 4))
    return ParallelLayout(tp * cp * dp * pp, tp_size=tp, cp_size=cp, pp_size=pp)


@given(layouts())
def test_rank_is_the_inverse_of_coordinates(layout: ParallelLayout) -> None:
    seen = set()
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        assert layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank
        assert all(0 <= getattr(at, axis) < getattr(layout, f"{axis}_size") for axis in AXES)
        seen.add(at)
    assert len(seen) == layout.world_size


@given(layouts(), st.integers(0, 50))
def test_a_role_on_later_ranks_has_the_same_coordinates_there(layout: ParallelLayout, first: int) -> None:
    later = replace(layout, first_rank=first)
    assert list(later.ranks) == [first + rank for rank in layout.ranks]
    for rank in layout.ranks:
        at = layout.coordinates(rank)
        assert later.coordinates(first + rank) == at
        assert later.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == first + rank
        for axes in (("tp",), ("dp", "cp"), ("pp",)):
            assert later.group_of(first + rank, *axes) == [first + other for other in layout.group_of(rank, *axes)]
    for rank in (first - 1, first + layout.world_size):
        for coordinates in (later.coordinates, later.expert_coordinates):
            with pytest.raises(ValueError, match=f"{rank} is not in range"):
                coordinates(rank)
    copies = later.model_copies().of
    assert copies == tuple(tuple(first + rank for rank in ranks) for ranks in layout.model_copies().of)


def test_numbering_runs_over_tp_first_and_pp_last() -> None:
    layout = ParallelLayout(24, tp_size=2, cp_size=3, pp_size=2)
    assert layout.dp_size == 2
    assert layout.coordinates(1) == Coordinates(tp=1, cp=0, dp=0, pp=0)
    assert layout.coordinates(2) == Coordinates(tp=0, cp=1, dp=0, pp=0)
    assert layout.coordinates(6) == Coordinates(tp=0, cp=0, dp=1, pp=0)
    assert layout.coordinates(12) == Coordinates(tp=0, cp=0, dp=0, pp=1)
    assert layout.rank(tp=1, cp=2, dp=1, pp=1) == 23
    assert list_groups(ParallelLayout(4, tp_size=2, pp_size=2), "pp") == [[0, 2], [1, 3]]


@settings(max_examples=40, deadline=None)
@given(layouts())
def test_groups_are_those_of_megatron(layout: ParallelLayout) -> None:
    """Compares with Megatron's default rank generator."""
    from megatron.core.parallel_state import RankGenerator

    generator = RankGenerator(
        tp=layout.tp_size, ep=1, dp=layout.dp_size, pp=layout.pp_size, cp=layout.cp_size, order="tp-cp-ep-dp-pp"
    )
    for token in (*AXES, "tp-pp", "dp-cp", "tp-cp", "tp-dp-cp", "tp-cp-dp-pp"):
        ours = list_groups(layout, *token.split("-"))
        # Order within a group is the order of ranks inside the group; order of the groups is free.
        assert sorted(ours) == sorted(generator.get_ranks(token)), token


@settings(max_examples=40, deadline=None)
@given(layouts(), st.data())
def test_expert_groups_are_those_of_megatron(layout: ParallelLayout, data: st.DataObject) -> None:
    """Compares with the generator that Megatron makes for expert layers; their TP is that of the dense ones, or 1."""
    from megatron.core.parallel_state import RankGenerator

    etp_size = data.draw(st.sampled_from([1, layout.tp_size]))
    shared = layout.stage_size // etp_size
    ep_size = data.draw(st.sampled_from([n for n in range(1, shared + 1) if shared % n == 0]))
    layout = replace(layout, ep_size=ep_size, etp_size=etp_size)
    generator = RankGenerator(
        tp=etp_size, ep=ep_size, dp=shared // ep_size, pp=layout.pp_size, cp=1, order="tp-cp-ep-dp-pp"
    )
    for token in ("tp", "ep", "dp", "pp", "tp-ep", "tp-ep-pp"):
        ours = list_groups(layout, *token.split("-"), of_experts=True)
        assert sorted(ours) == sorted(generator.get_ranks(token)), token


def test_expert_parallel_ranks_are_neighbors_in_data_parallelism() -> None:
    layout = ParallelLayout(16, tp_size=2, pp_size=2, ep_size=2)
    assert layout.expert_coordinates(2) == ExpertCoordinates(tp=0, ep=1, dp=0, pp=0)
    assert layout.expert_coordinates(5) == ExpertCoordinates(tp=1, ep=0, dp=1, pp=0)
    assert layout.expert_coordinates(15) == ExpertCoordinates(tp=1, ep=1, dp=1, pp=1)
    assert layout.expert_group_of(2, "ep") == [0, 2] and layout.expert_group_of(4, "dp") == [0, 4]


@given(layouts(), st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_ranks(layout: ParallelLayout, axes: set[str]) -> None:
    groups = list_groups(layout, *axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert all(group == sorted(group) for group in groups)
    assert len({len(group) for group in groups}) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        dict(world_size=6, tp_size=4),
        dict(world_size=2, tp_size=2, pp_size=2),
        dict(world_size=8, tp_size=2, cp_size=3),
        dict(world_size=0),
        dict(world_size=4, tp_size=0),
        dict(world_size=4, tp_size=-2, pp_size=-2),
        dict(world_size=4, vpp_size=0),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UserError, match="not a multiple"):
        ParallelLayout(**sizes)


def test_error_names_the_numbers_and_a_world_size_that_works() -> None:
    with pytest.raises(UserError, match=r"world_size 7 .* 2 \* 2 \* 1 = 4") as caught:
        ParallelLayout(7, tp_size=2, pp_size=2)
    assert "start 4 ranks" in caught.value.hint
    with pytest.raises(UserError, match="expert_model_parallel_size 3 does not divide cp \\* dp = 4"):
        ParallelLayout(8, tp_size=2, cp_size=2, ep_size=3)
    with pytest.raises(UserError, match="expert_model_parallel_size 3 does not divide tp \\* cp \\* dp = 8"):
        ParallelLayout(8, tp_size=2, cp_size=2, ep_size=3, etp_size=1)
    with pytest.raises(UserError, match="(?s)expert_tensor_parallel_size 2 with tensor_model_parallel_size 4.*1 or 4"):
        ParallelLayout(8, tp_size=4, etp_size=2)
    assert ParallelLayout(8, tp_size=2, cp_size=2, ep_size=4).dp_size == 2


def test_describe_names_only_what_is_used() -> None:
    assert ParallelLayout(8, tp_size=2, pp_size=2).describe() == "tp=2 pp=2 dp=2"
    assert ParallelLayout(8, pp_size=2, vpp_size=3, cp_size=2, ep_size=4).describe() == "tp=1 pp=2 dp=2 vpp=3 cp=2 ep=4"
