# SPDX-License-Identifier: Apache-2.0
"""Exchanges between ranks: their invariants, and cases by hand. test_microbatches.py measures their quality."""

from __future__ import annotations

import copy
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.samples import balancing

BUDGET = 20
UNITS = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 50)), max_size=12)


def loads(ranks: list[list[list[int]]], costs: np.ndarray) -> list[int]:
    return [int(sum(costs[members].sum() for members in rank)) for rank in ranks]


def balance(ranks: list[list[list[int]]], tokens: np.ndarray, costs: np.ndarray, budget: int) -> list[list[list[int]]]:
    """Balanced ranks; units of a bin are sorted."""
    bins = [*chain.from_iterable(ranks)]
    bin_of = np.zeros(len(costs), np.int64)
    for number, members in enumerate(bins):
        bin_of[members] = number
    balancing.balance_ranks(bin_of, len(bins), len(ranks), tokens, costs, budget)
    found = [np.flatnonzero(bin_of == number).tolist() for number in range(len(bins))]
    count = len(bins) // len(ranks)
    return [found[i : i + count] for i in range(0, len(bins), count)]


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
    tokens, costs, before = np.array(tokens, np.int64), np.array(costs, np.int64), ranks
    ranks = balance(before, tokens, costs, BUDGET)
    assert sorted(u for rank in ranks for members in rank for u in members) == list(range(len(tokens)))
    assert all(tokens[members].sum() <= BUDGET for rank in ranks for members in rank)
    assert max(loads(ranks, costs)) <= max(loads(before, costs))


def exchange_once(ranks: list[list[list[int]]], tokens: np.ndarray, costs: np.ndarray, budget: int) -> bool:
    """The rule pair by pair: the costliest rank and the cheapest that can exchange, nearest to half the gap."""
    of, mean = loads(ranks, costs), costs.sum() / len(ranks)
    high = of.index(max(of))
    if max(of) <= 1.001 * mean or sum(map(len, ranks[high])) < 2:
        return False
    empty = [rank for rank, load in enumerate(of) if load == 0]
    for low in sorted(set(range(len(ranks))) - set(empty[:-1]), key=lambda rank: (of[rank], -rank)):
        gap, found = of[high] - of[low], []
        takes = [(unit, into) for into in ranks[low] for unit in into] + [(None, into) for into in ranks[low]]
        for out in ranks[high]:
            for unit in out:
                for taken, into in takes:
                    back = (0, 0) if taken is None else (tokens[taken], costs[taken])
                    moved, more = costs[unit] - back[1], tokens[unit] - back[0]
                    fits = tokens[into].sum() + more <= budget and tokens[out].sum() - more <= budget
                    if 0 < moved < gap and fits:
                        found.append((abs(2 * moved - gap), len(found), out, unit, into, taken))
        if found:
            _, _, out, unit, into, taken = min(found)
            out.remove(unit)
            into.append(unit)
            if taken is not None:
                into.remove(taken)
                out.append(taken)
            return True
    return False


@pytest.mark.parametrize(("most_pairs", "most_ranks"), [(0, 1), (12, 2), (256, 32)])
def test_few_and_many_pairs_are_exchanged_by_one_rule(
    most_pairs: int, most_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 random starts, many of equal costs; numpy alone, both in turn, pair after pair."""
    monkeypatch.setattr(balancing, "_TRIED_AT_ONCE", most_pairs)
    monkeypatch.setattr(balancing, "_TRIED_IN_TURN", most_ranks)
    num_exchanges = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        num_ranks, num_units = int(random.integers(2, 7)), int(random.integers(4, 24))
        ranks: list[list[list[int]]] = [[[], []] for _ in range(num_ranks)]
        tokens, costs = random.integers(0, 6, num_units), random.integers(0, (4, 1000)[seed % 2], num_units)
        for unit in range(num_units):
            ranks[unit % (1 + num_ranks // 2)][unit % 2].append(unit)
        budget = max(int(tokens[members].sum()) for rank in ranks for members in rank)
        expected = copy.deepcopy(ranks)
        for _ in range(8 * num_ranks):
            if not exchange_once(expected, tokens, costs, budget):
                break
            num_exchanges += 1
        sorted_expected = [[sorted(members) for members in rank] for rank in expected]
        assert balance(ranks, tokens, costs, budget) == sorted_expected, seed
    assert num_exchanges > 500


@pytest.mark.parametrize(("budget", "expected"), [(20, [15, 15]), (9, [20, 10])])
def test_a_unit_moves_where_it_fits(budget: int, expected: list[int]) -> None:
    """Costs 15 + 5 against 5 + 5: moving 5 makes them even, but its 5 tokens must fit behind 4 + 5.

    Units without cost fill the other bins.
    """
    ranks, costs = [[[0], [1, 5]], [[2, 3], [4]]], np.array([15, 5, 5, 5, 0, 0])
    assert loads(balance(ranks, np.array([9, 5, 4, 5, 9, 4]), costs, budget), costs) == expected


def test_units_are_exchanged_where_nothing_can_move() -> None:
    """Full bins of one unit each: 9 and 7 against 5 and 3 become 9 + 3 and 7 + 5."""
    ranks, costs = [[[0], [1]], [[2], [3]]], np.array([9, 7, 5, 3])
    assert loads(balance(ranks, np.array([10, 10, 10, 10]), costs, 10), costs) == [12, 12]
