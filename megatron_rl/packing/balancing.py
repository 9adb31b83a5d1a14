# SPDX-License-Identifier: Apache-2.0
"""Local search for packing.py: ranks exchange units until their costs are even (pure)."""

from __future__ import annotations

from bisect import insort
from itertools import chain

import numpy as np

_NO_UNIT = np.iinfo(np.int64).max  # cost of the lightest unit of a rank without units
_TRIED_AT_ONCE = 256  # pairs of units, at first; as few are cheaper in Python than in numpy
_GOOD_ENOUGH = 1.001  # cost of the heaviest rank over the mean at which the search ends


def balance_ranks(ranks: list[list[list[int]]], tokens: np.ndarray, costs: np.ndarray, max_tokens: int) -> None:
    """Exchange units, in place, between the costliest rank and cheaper ones, as long as that makes it cheaper.

    Args:
        ranks: [dp_size][num_bins] -> units.
        tokens: [num_units] int64; a bin holds at most `max_tokens` of them, before and after.
        costs: [num_units] int64.
        max_tokens: budget of a bin.
    """
    num_units, total = len(costs), int(costs.sum())
    rank_of, units = _list_units([[*chain.from_iterable(rank)] for rank in ranks])
    loads, lightest = np.zeros(len(ranks), np.int64), np.full(len(ranks), _NO_UNIT)
    np.add.at(loads, rank_of, costs[units])
    np.minimum.at(lightest, rank_of, costs[units])  # unit of each rank
    last = len(ranks) - 1
    by_load = sorted(load * len(ranks) + last - rank for rank, load in enumerate(loads.tolist()))
    token_list, cost_list = [*tokens.tolist(), 0], [*costs.tolist(), 0]  # the last: of unit -1, "nothing"
    for _ in range(8 * len(ranks)):
        (least, low), (most, high) = divmod(by_load[0], len(ranks)), divmod(by_load[-1], len(ranks))
        low, high = last - low, last - high
        give = [cost_list[unit] for members in ranks[high] for unit in members]
        if most * len(ranks) <= _GOOD_ENOUGH * total or len(give) < 2:
            return  # a single unit is not less anywhere else
        moved = None
        if len(give) * sum(len(members) + 1 for members in ranks[low]) <= _TRIED_AT_ONCE:
            moved = _exchange_few(ranks[high], ranks[low], most - least, token_list, cost_list, max_tokens)
        if moved is None:  # with the cheapest rank, or there are too many pairs
            order = np.argsort(-loads, kind="stable")
            gaps = loads[high] - loads
            gaps[order[np.count_nonzero(loads) : -1]] = 0  # ranks without units are alike: one of them is tried
            is_possible = (gaps > min(give)) | ((gaps > 0) & (lightest < max(give)))
            lows = order[is_possible[order]][::-1]
            found, some, width = None, lows, 1 + _TRIED_AT_ONCE * len(ranks) // (num_units * len(give))
            while len(lows) and found is None:  # most exchange with one of the first
                some, lows, width = lows[:width], lows[width:], 2 * width
                found = _exchange_best(ranks[high], [ranks[low] for low in some], gaps[some], tokens, costs, max_tokens)
            if found is None:
                return
            low, moved = int(some[found[0]]), found[1]
        by_load.pop()
        by_load.remove(int(loads[low]) * len(ranks) + last - low)
        for rank, more in ((high, -moved), (low, moved)):
            loads[rank] += more
            insort(by_load, int(loads[rank]) * len(ranks) + last - rank)
            lightest[rank] = min((cost_list[unit] for members in ranks[rank] for unit in members), default=_NO_UNIT)


def _exchange_few(
    high: list[list[int]], low: list[list[int]], gap: int, tokens: list[int], costs: list[int], max_tokens: int
) -> int | None:
    """Exchange as `_exchange_best` does with one cheaper rank, pair after pair; returns the cost moved to it."""
    rooms = [max_tokens - sum(tokens[unit] for unit in members) for members in low]
    takes = [(unit, b) for b, members in enumerate(low) for unit in members] + [(-1, b) for b in range(len(low))]
    nearest, pair = gap, None  # a distance below the gap: more than 0 moves, and less than the gap
    for members in high:
        room = max_tokens - sum(tokens[unit] for unit in members)
        for unit in members:
            for taken, b in takes:
                distance = abs(2 * (costs[unit] - costs[taken]) - gap)
                if distance < nearest and -room <= tokens[unit] - tokens[taken] <= rooms[b]:
                    nearest, pair = distance, (members, unit, low[b], taken)
    if pair is None:
        return None
    _exchange(*pair)
    return costs[pair[1]] - costs[pair[3]]


def _exchange_best(
    high: list[list[int]],
    lows: list[list[list[int]]],
    gaps: np.ndarray,
    tokens: np.ndarray,
    costs: np.ndarray,
    max_tokens: int,
) -> tuple[int, int] | None:
    """Exchange the pair that comes closest to moving half of the gap, or move one unit, with the first that can.

    Returns:
        Index of the cheaper rank in `lows`, and the cost moved to it; None if no exchange is possible.
    """
    bins = [members for rank in lows for members in rank]
    give_bin, give = _list_units(high)
    take_bin, take = _list_units(bins)
    # "Nothing" can be taken in exchange, in every bin: unit -1 without tokens and cost.
    take_bin = np.concatenate([take_bin, np.arange(len(bins))])
    take = np.concatenate([take, np.full(len(bins), -1)])
    take_rank = take_bin // (len(bins) // len(lows))
    gap = gaps[take_rank]
    take_tokens, take_costs = np.where(take < 0, 0, tokens[take]), np.where(take < 0, 0, costs[take])
    more = tokens[give][:, None] - take_tokens[None]  # tokens that the low bin gains
    room_low = max_tokens - np.bincount(take_bin, take_tokens, len(bins)).astype(np.int64)[take_bin]
    room_high = (max_tokens - np.array([tokens[m].sum() for m in high], np.int64))[give_bin]
    moved = costs[give][:, None] - take_costs[None]
    is_possible = (moved > 0) & (moved < gap) & (more <= room_low) & (-more <= room_high[:, None])
    can_take = take_rank[is_possible.any(axis=0)]
    if len(can_take) == 0:
        return None
    low = int(can_take.min())
    is_possible &= take_rank == low
    distance = np.where(is_possible, np.abs(2 * moved - gap), np.iinfo(np.int64).max)
    i, j = np.unravel_index(int(np.argmin(distance)), distance.shape)
    _exchange(high[give_bin[i]], int(give[i]), bins[take_bin[j]], int(take[j]))
    return low, int(moved[i, j])


def _exchange(high: list[int], given: int, low: list[int], taken: int) -> None:
    """Move a unit from one bin to another, and one back unless that is -1."""
    high.remove(given)
    low.append(given)
    if taken >= 0:
        low.remove(taken)
        high.append(taken)


def _list_units(bins: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The bin of each unit, and the unit."""
    bin_of = np.repeat(np.arange(len(bins)), [len(members) for members in bins])
    return bin_of, np.fromiter(chain.from_iterable(bins), np.int64, len(bin_of))
