# SPDX-License-Identifier: Apache-2.0
"""Exchanges between ranks: what must not change, and cases done by hand. How good they are: test_packing.py."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.packing.balancing import balance_ranks

BUDGET = 20
UNITS = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 50)), max_size=12)


def loads(ranks: list[list[list[int]]], costs: np.ndarray) -> list[int]:
    return [int(sum(costs[members].sum() for members in rank)) for rank in ranks]


@given(st.lists(st.lists(UNITS, min_size=2, max_size=2), min_size=1, max_size=4))
def test_budget_and_units_are_kept_and_the_heaviest_gets_no_heavier(drawn: list[list[list[tuple[int, int]]]]) -> None:
    """Units are dropped at the end of a bin until it fits the budget."""
    tokens, costs, ranks = [], [], []
    for rank in drawn:
        ranks.append([])
        for members in rank:
            ranks[-1].append([])
            for size, cost in members:
                if sum(tokens[u] for u in ranks[-1][-1]) + size <= BUDGET:
                    ranks[-1][-1].append(len(tokens))
                    tokens.append(size)
                    costs.append(cost)
    tokens, costs, before = np.array(tokens, np.int64), np.array(costs, np.int64), copy.deepcopy(ranks)
    balance_ranks(ranks, tokens, costs, BUDGET)
    assert sorted(u for rank in ranks for members in rank for u in members) == list(range(len(tokens)))
    assert all(tokens[members].sum() <= BUDGET for rank in ranks for members in rank)
    assert [len(rank) for rank in ranks] == [len(rank) for rank in before]
    assert max(loads(ranks, costs)) <= max(loads(before, costs))


@pytest.mark.parametrize(("budget", "expected"), [(20, [15, 15]), (9, [20, 10])])
def test_a_unit_moves_where_it_fits(budget: int, expected: list[int]) -> None:
    """Costs 15 + 5 against 5 + 5: moving 5 makes them even, but its 5 tokens must fit behind 4 + 5."""
    ranks, costs = [[[0], [1]], [[2, 3]]], np.array([15, 5, 5, 5])
    balance_ranks(ranks, np.array([9, 5, 4, 5]), costs, budget)
    assert loads(ranks, costs) == expected


def test_units_are_exchanged_where_nothing_can_move() -> None:
    """Full bins of one unit each: 9 and 7 against 5 and 3 become 9 + 3 and 7 + 5."""
    ranks, costs = [[[0], [1]], [[2], [3]]], np.array([9, 7, 5, 3])
    balance_ranks(ranks, np.array([10, 10, 10, 10]), costs, 10)
    assert loads(ranks, costs) == [12, 12]
