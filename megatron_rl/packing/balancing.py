# SPDX-License-Identifier: Apache-2.0
"""Local search for packing.py: ranks exchange units until their costs are even (pure)."""

from __future__ import annotations

import numpy as np

_GOOD_ENOUGH = 1.001  # cost of the heaviest rank over the mean at which the search ends


def balance_ranks(ranks: list[list[list[int]]], tokens: np.ndarray, costs: np.ndarray, max_tokens: int) -> None:
    """Exchange units, in place, between the costliest rank and cheaper ones, as long as that makes it cheaper.

    Args:
        ranks: [dp_size][num_bins] -> units.
        tokens: [num_units] int64; a bin holds at most `max_tokens` of them, before and after.
        costs: [num_units] int64.
        max_tokens: budget of a bin.
    """
    loads = np.array([sum(int(costs[members].sum()) for members in rank) for rank in ranks])
    for _ in range(8 * len(ranks)):
        high, *others = np.argsort(-loads, kind="stable").tolist()
        if loads[high] * len(ranks) <= _GOOD_ENOUGH * loads.sum():
            return
        is_empty_tried = False  # ranks without units are alike
        for low in reversed(others):
            if loads[low] == 0 and is_empty_tried:
                continue
            is_empty_tried = is_empty_tried or loads[low] == 0
            gap = int(loads[high] - loads[low])
            if moved := _exchange_best(ranks[high], ranks[low], gap, tokens, costs, max_tokens):
                loads[high] -= moved
                loads[low] += moved
                break
        else:
            return


def _exchange_best(
    high: list[list[int]], low: list[list[int]], gap: int, tokens: np.ndarray, costs: np.ndarray, max_tokens: int
) -> int:
    """Exchange the pair that comes closest to moving half of the gap, or move one unit; returns the cost moved."""
    give_bin, give = _list_units(high)
    take_bin, take = _list_units(low)
    if len(give) == 0:
        return 0
    # "Nothing" can be taken in exchange, in every bin: unit -1 without tokens and cost.
    take_bin = np.concatenate([take_bin, np.arange(len(low))])
    take = np.concatenate([take, np.full(len(low), -1)])
    take_tokens, take_costs = np.where(take < 0, 0, tokens[take]), np.where(take < 0, 0, costs[take])
    more = tokens[give][:, None] - take_tokens[None]  # tokens that the low bin gains
    room_low = (max_tokens - np.array([tokens[m].sum() for m in low], np.int64))[take_bin]
    room_high = (max_tokens - np.array([tokens[m].sum() for m in high], np.int64))[give_bin]
    moved = costs[give][:, None] - take_costs[None]
    is_possible = (moved > 0) & (moved < gap) & (more <= room_low[None]) & (-more <= room_high[:, None])
    distance = np.where(is_possible, np.abs(2 * moved - gap), np.iinfo(np.int64).max)
    i, j = np.unravel_index(int(np.argmin(distance)), distance.shape)
    if not is_possible[i, j]:
        return 0
    high[give_bin[i]].remove(give[i])
    low[take_bin[j]].append(int(give[i]))
    if take[j] >= 0:
        low[take_bin[j]].remove(take[j])
        high[give_bin[i]].append(int(take[j]))
    return int(moved[i, j])


def _list_units(rank: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The units of a rank and the bin of each."""
    bins = [b for b, members in enumerate(rank) for _ in members]
    return np.array(bins, np.int64), np.array([unit for members in rank for unit in members], np.int64)
