# SPDX-License-Identifier: Apache-2.0
"""The invariants that packing.py states, on random lengths; the metrics on numbers done by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.packing import packing_metrics, plan_microbatches

MAX_TOKENS = 64
LENGTHS = st.lists(st.integers(1, MAX_TOKENS), max_size=40)
DP_SIZE = st.integers(1, 4)
COUNT_MULTIPLE = st.integers(1, 3)


@given(LENGTHS, DP_SIZE, COUNT_MULTIPLE)
def test_every_sequence_is_in_exactly_one_microbatch(lengths: list[int], dp_size: int, multiple: int) -> None:
    plan = plan_microbatches(lengths, dp_size=dp_size, max_tokens=MAX_TOKENS, count_multiple=multiple)
    placed = [index for rank in plan for members in rank for index in members]
    assert sorted(placed) == list(range(len(lengths)))


@given(LENGTHS, DP_SIZE, COUNT_MULTIPLE)
def test_no_microbatch_exceeds_the_budget(lengths: list[int], dp_size: int, multiple: int) -> None:
    plan = plan_microbatches(lengths, dp_size=dp_size, max_tokens=MAX_TOKENS, count_multiple=multiple)
    assert all(sum(lengths[i] for i in members) <= MAX_TOKENS for rank in plan for members in rank)


@given(LENGTHS, DP_SIZE, COUNT_MULTIPLE)
def test_ranks_have_the_same_number_of_microbatches(lengths: list[int], dp_size: int, multiple: int) -> None:
    plan = plan_microbatches(lengths, dp_size=dp_size, max_tokens=MAX_TOKENS, count_multiple=multiple)
    counts = {len(rank) for rank in plan}
    assert len(plan) == dp_size and len(counts) == 1
    count = counts.pop()
    assert count >= 1 and count % multiple == 0


@given(LENGTHS, DP_SIZE, COUNT_MULTIPLE)
def test_number_of_microbatches_is_small(lengths: list[int], dp_size: int, multiple: int) -> None:
    """Filling the emptiest bin overflows only when every bin is more than half full, or holds a longer sequence.

    So at most twice the bins that the tokens need, plus rounding. Does not cover optimality: the heuristic may miss
    a tighter packing.
    """
    plan = plan_microbatches(lengths, dp_size=dp_size, max_tokens=MAX_TOKENS, count_multiple=multiple)
    bins_that_are_enough = max(1, 2 * sum(lengths) // MAX_TOKENS + 1)
    bins_per_rank = -(-bins_that_are_enough // dp_size)
    assert len(plan[0]) <= -(-bins_per_rank // multiple) * multiple


@given(LENGTHS, DP_SIZE)
def test_ranks_loads_are_close(lengths: list[int], dp_size: int) -> None:
    """Longest-first over bins, then bins over ranks: loads differ by at most one full microbatch."""
    plan = plan_microbatches(lengths, dp_size=dp_size, max_tokens=MAX_TOKENS)
    loads = [sum(lengths[i] for members in rank for i in members) for rank in plan]
    assert max(loads) - min(loads) <= MAX_TOKENS


@given(LENGTHS, DP_SIZE)
def test_plan_depends_on_the_lengths_only(lengths: list[int], dp_size: int) -> None:
    """Another sequence type with equal numbers gives an equal plan. Not covered: other Python processes."""
    first = plan_microbatches(lengths, dp_size=dp_size, max_tokens=MAX_TOKENS)
    assert plan_microbatches(tuple(lengths), dp_size=dp_size, max_tokens=MAX_TOKENS) == first


def test_plan_by_hand() -> None:
    """10 tokens of budget, 7+3 and 6+4 fill two microbatches, one for each rank."""
    assert plan_microbatches([3, 6, 7, 4], dp_size=2, max_tokens=10) == [[[0, 2]], [[1, 3]]]


def test_few_sequences_leave_empty_microbatches() -> None:
    plan = plan_microbatches([5], dp_size=2, max_tokens=10, count_multiple=2)
    assert plan == [[[0], []], [[], []]]


def test_sequence_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="11 tokens does not fit into a microbatch of 10"):
        plan_microbatches([3, 11], dp_size=1, max_tokens=10)


def test_metrics_by_hand() -> None:
    """Loads 9 and 3 in 2 x 2 microbatches of 10: 12 of 40 tokens, and 9 over a mean of 6."""
    metrics = packing_metrics([[[0], [1]], [[2], []]], [4, 5, 3], 10)
    assert metrics == {"packing/efficiency": pytest.approx(0.3), "packing/imbalance": pytest.approx(1.5)}


def test_metrics_without_sequences() -> None:
    assert packing_metrics([[[]], [[]]], [], 10) == {"packing/efficiency": 0.0, "packing/imbalance": 1.0}
