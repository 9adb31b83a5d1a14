# SPDX-License-Identifier: Apache-2.0
"""Even costs of DP ranks: exchanges of units, sets of sequences that stay together (pure)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, islice, pairwise

import numpy as np

_TRIED_AT_ONCE = 256  # pairs of units, up to which Python is faster than numpy
_TRIED_IN_TURN = 32  # ranks, before numpy finds the first that is left
_GOOD_ENOUGH = 1.001  # the search ends at this ratio of the heaviest rank's cost to the mean


def balance_ranks(
    bin_of: np.ndarray, num_bins: int, dp_size: int, tokens: np.ndarray, costs: np.ndarray, max_tokens: int
) -> None:
    """Exchange units, in place, between the costliest rank and cheaper ranks until its cost no longer falls.

    Args:
        bin_of: [num_units] bin (microbatch) of each unit; `num_bins / dp_size` adjacent bins belong to a rank.
        tokens, costs: [num_units] int64.
    """
    rank_of, loads, enough = bin_of * dp_size // num_bins, np.zeros(dp_size, np.int64), _GOOD_ENOUGH * int(costs.sum())
    np.add.at(loads, rank_of, costs)
    heaviest = loads.argmax()
    if int(loads[heaviest]) * dp_size <= enough or np.count_nonzero(rank_of == heaviest) < 2:
        return  # moving its only unit would not lower the maximum
    ranks = _Ranks(bin_of, loads, num_bins, tokens, costs, max_tokens)
    for _ in range(8 * dp_size):
        top, _, heavy = ranks.by_load[-1]
        if top * dp_size <= enough or len(heavy) < 3 or not ranks.exchange():
            return


class _Ranks:
    """DP ranks that exchange units (sequences packed together); unit -1 stands for "nothing"."""

    def __init__(
        self, bin_of: np.ndarray, loads: np.ndarray, num_bins: int, tokens: np.ndarray, costs: np.ndarray, budget: int
    ) -> None:
        dp_size = len(loads)
        self.bin_of, self.loads, self.unit_costs = bin_of, loads, costs
        self.num_bins = num_bins // dp_size  # of a rank
        self.tokens, self.costs = [*tokens.tolist(), 0], [*costs.tolist(), 0]
        units = np.argsort(bin_of, kind="stable").tolist()
        bounds = [0, *np.bincount(bin_of, minlength=num_bins).cumsum().tolist()]
        self.bins = [units[i:j] for i, j in pairwise(bounds)]
        rooms = np.full(num_bins, budget)
        np.subtract.at(rooms, bin_of, tokens)
        self.rooms = rooms.tolist()
        extended = np.append(costs, np.zeros(dp_size, np.int64))  # every rank has "nothing"
        held = extended[np.lexsort((extended, np.append(bin_of // self.num_bins, np.arange(dp_size))))].tolist()
        starts = [bounds[rank * self.num_bins] + rank for rank in range(dp_size + 1)]
        self.by_load = sorted(
            (load, -rank, held[i:j])
            for rank, (load, (i, j)) in enumerate(zip(loads.tolist(), pairwise(starts), strict=True))
        )

    def exchange(self) -> bool:
        """Exchange units of the costliest rank with the cheapest rank possible; return False if there is none."""
        top, high, heavy = self.by_load[-1]
        load, low, light, pair = top, high, heavy, None
        gives, least, most = heavy[1:], heavy[1], heavy[-1]
        for place, (load, low, light) in enumerate(chain(self.by_load[:_TRIED_IN_TURN], self._list_others(gives, top))):
            gap = top - load
            if (place and not load) or (gap <= least and light[1] >= most):
                continue  # one empty rank is enough to try; if no unit can move alone, a lighter one must come back
            for cost in gives:
                if 0 < cost - light[bisect_left(light, cost) - 1] < gap:
                    pair = _exchange_best(self, -high, -low, gap)
                    break
            if pair is not None:
                break
        if pair is None:
            return False
        given, source, taken, target = pair
        del self.by_load[-1], self.by_load[bisect_left(self.by_load, (load, low))]
        self.bin_of[given] = target
        heavy.remove(self.costs[given])
        insort(light, self.costs[given])
        if taken >= 0:
            self.bin_of[taken] = source
            light.remove(self.costs[taken])
            insort(heavy, self.costs[taken])
        moved = self.costs[given] - self.costs[taken]
        self.loads[-high], self.loads[-low] = top - moved, load + moved
        insort(self.by_load, (top - moved, high, heavy))
        insort(self.by_load, (load + moved, low, light))
        return True

    def _list_others(self, gives: list[int], top: int) -> Iterator[tuple[int, int, list[int]]]:
        """Yield entries of `by_load` after `_TRIED_IN_TURN`, from the first rank that allows a useful exchange.

        Args:
            gives: costs of the costliest rank's units, ascending.
            top: load of that rank.
        """
        start = _TRIED_IN_TURN
        if start < len(self.by_load) and top - self.by_load[start][0] <= gives[0]:  # no unit can move alone
            above = np.array([*gives, np.iinfo(np.int64).max])  # the next costlier unit given
            above = above[np.searchsorted(above, self.unit_costs, "right")]
            loads = self.loads[self.bin_of // self.num_bins]
            loads = loads[above - self.unit_costs < top - loads].tolist()
            start = max(start, bisect_left(self.by_load, (min(loads, default=top),)))
        yield from islice(self.by_load, start, None)


def _exchange_best(ranks: _Ranks, high: int, low: int, gap: int) -> tuple[int, int, int, int] | None:
    """Exchange two units, or move one, so that close to half of the cost difference `gap` moves from `high` to `low`.

    Returns the unit given to rank `low`, its bin, the unit taken (-1 if none) and its bin; `None` if impossible.
    """
    count, bins, rooms, tokens, costs = ranks.num_bins, ranks.bins, ranks.rooms, ranks.tokens, ranks.costs
    into = range(low * count, low * count + count)
    gives = [(unit, a) for a in range(high * count, high * count + count) for unit in bins[a]]
    takes = [(unit, b) for b in into for unit in bins[b]]
    takes += [(-1, b) for b in into]  # a unit can move to any bin without an exchange
    nearest, pair = gap, None  # a distance below the gap: more than 0 moves, and less than the gap
    if len(takes) * len(gives) > _TRIED_AT_ONCE:
        out, back = ([(tokens[unit], costs[unit], rooms[b]) for unit, b in side] for side in (gives, takes))
        (sizes, given, room), (lengths, taken, room_low) = np.array(out).T[:, :, None], np.array(back).T
        more, distance = sizes - lengths, np.abs(2 * (given - taken) - gap)
        distance[(more > room_low) | (-more > room)] = gap
        i, j = np.unravel_index(int(np.argmin(distance)), distance.shape)
        pair = (*gives[i], *takes[j]) if distance[i, j] < gap else None
    else:
        offers = [(2 * costs[unit] + gap, tokens[unit], rooms[b], unit, b) for unit, b in takes]
        for unit, a in gives:
            twice, size, room = 2 * costs[unit], tokens[unit], rooms[a]
            for middle, length, room_low, taken, b in offers:
                if -nearest < twice - middle < nearest and -room <= size - length <= room_low:
                    nearest, pair = abs(twice - middle), (unit, a, taken, b)
    if pair is None:
        return None
    given, a, taken, b = pair
    bins[a].remove(given)
    bins[b].append(given)
    if taken >= 0:
        bins[b].remove(taken)
        bins[a].append(taken)
    rooms[a] += tokens[given] - tokens[taken]
    rooms[b] -= tokens[given] - tokens[taken]
    return pair
