# SPDX-License-Identifier: Apache-2.0
"""Assignment of sequences to microbatches and DP ranks (pure).

Invariants (asserted in tests/samples/test_microbatches.py):

* every sequence is in exactly one microbatch;
* no microbatch exceeds the token budget, a shared prefix counted once per microbatch;
* every DP rank has the same number of microbatches (pipeline schedules need it), a multiple of `count_multiple`; some
  may be empty;
* inside a microbatch sequences keep their order (that of `SharedPrefixes`, if given);
* sequences that share a prefix are separated, at their shortest common prefix, only if they exceed the budget or
  overload the heaviest rank;
* the heaviest rank costs at most `_CLOSE` times that of the plain plan without sharing;
* the result depends on the lengths only (costs are integers): every rank computes the same plan.

The cost of a sequence of s tokens is s + attention_ratio * s^2: all work linear in the tokens, plus causal attention.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise

import numpy as np

from megatron_rl.samples.prefix import SharedPrefixes

_GOOD_ENOUGH = 1.001  # the search ends at this ratio of the heaviest rank's cost to the mean


def balance_ranks(ranks: list[list[list[int]]], tokens: np.ndarray, costs: np.ndarray, max_tokens: int) -> None:
    """Exchange units, in place, between the costliest rank and cheaper ranks until its cost no longer falls.

    Args:
        ranks: [dp_size][num_bins] -> units.
        tokens, costs: [num_units] int64.
    """
    tokens, costs = np.append(tokens, 0), np.append(costs, 0)  # the last entry is for unit -1: "nothing"
    cost_list = costs.tolist()
    held = [sorted([0, *[cost_list[unit] for members in rank for unit in members]]) for rank in ranks]  # 0: "nothing"
    by_load = sorted((sum(light), -rank, light) for rank, light in enumerate(held))
    enough = _GOOD_ENOUGH * sum(cost_list)
    for _ in range(8 * len(ranks)):
        top, high, heavy = by_load[-1]
        if top * len(ranks) <= enough or len(heavy) < 3:
            return  # moving its only unit would not lower the maximum
        pair, place, low, light = None, 0, 0, heavy
        gives, least, most = heavy[1:], heavy[1], heavy[-1]
        for place, (load, low, light) in enumerate(by_load):
            gap = top - load
            if (place and not load) or (gap <= least and light[1] >= most):
                continue  # one empty rank is enough to try; if no unit can move alone, a lighter one must come back
            if any(0 < cost - light[bisect_left(light, cost) - 1] < gap for cost in gives):
                pair = _exchange_best(ranks[-high], ranks[-low], gap, tokens, costs, max_tokens)
                if pair is not None:
                    break
        if pair is None:
            return
        given, taken = (cost_list[unit] for unit in pair)
        load = by_load[place][0]
        del by_load[-1], by_load[place]
        heavy.remove(given)
        insort(light, given)
        if pair[1] >= 0:
            light.remove(taken)
            insort(heavy, taken)
        insort(by_load, (top - given + taken, high, heavy))
        insort(by_load, (load + given - taken, low, light))


def _exchange_best(
    high: list[list[int]], low: list[list[int]], gap: int, tokens: np.ndarray, costs: np.ndarray, max_tokens: int
) -> tuple[int, int] | None:
    """Exchange the best pair of units and return it: given and taken (-1 if none); `None` if no exchange helps."""
    # The best comes closest to moving half of the gap.
    gives = [(unit, a) for a, members in enumerate(high) for unit in members]
    takes = [(unit, b) for b, members in enumerate(low) for unit in members]
    takes += [(-1, b) for b in range(len(low))]  # a unit can move to any bin without an exchange
    room_high, room_low = ([max_tokens - int(tokens[members].sum()) for members in bins] for bins in (high, low))
    more, moved = (
        np.subtract.outer(of[[unit for unit, _ in gives]], of[[unit for unit, _ in takes]]) for of in (tokens, costs)
    )
    distance = np.abs(2 * moved - gap)
    overflows_low = more > np.take(room_low, [b for _, b in takes])
    distance[overflows_low | (-more > np.take(room_high, [a for _, a in gives])[:, None])] = gap
    i, j = np.unravel_index(int(np.argmin(distance)), distance.shape)
    if distance[i, j] >= gap:  # a distance below the gap: more than 0 moves, and less than the gap
        return None
    (given, a), (taken, b) = gives[i], takes[j]
    high[a].remove(given)
    low[b].append(given)
    if taken >= 0:
        low[b].remove(taken)
        high[a].append(taken)
    return given, taken


MicrobatchPlan = list[list[list[int]]]  # [dp_size][num_microbatches] -> indices of sequences
_Joined = tuple[np.ndarray, np.ndarray]  # concatenated members of parts, and the bounds of the parts

_COST_SCALE = 1024  # units of cost per token of linear work; costs are integers
_TRIED_ONE_BY_ONE = 64  # numbers of bins, before bisection starts
_CLOSE = 1.05  # costs within this ratio count as equal
_MOST_ROUNDS = 16  # rounds of splitting groups of overloaded ranks
_FEW_RANKS = 8  # up to this many overloaded ranks, groups are split one at a time


def compute_attention_ratio(num_linear: float, num_heads: int, key_dim: int, value_dim: int) -> float:
    """Compute r such that causal attention over s tokens costs r * s times as much as the linear layers.

    Multiply-adds of one layer: s^2 n (d + d_v) / 2 for scores and values (half of them are masked), against s times its
    matrix elements. The output layer and norms are left out.

    Args:
        num_linear: matrix elements applied to a token in a layer; with MoE, only active experts.
        num_heads: n, query heads.
        key_dim, value_dim: d and d_v, channels of a head.
    """
    return num_heads * (key_dim + value_dim) / 2 / num_linear


@dataclass(frozen=True)
class _Workload:
    """Tokens and costs [num_sequences] of sequences that are packed together."""

    tokens: np.ndarray
    costs: np.ndarray
    attention_ratio: float
    shared: SharedPrefixes | None

    @classmethod
    def measure(cls, lengths: Sequence[int], attention_ratio: float, shared: SharedPrefixes | None) -> _Workload:
        tokens = np.asarray(lengths, np.int64)
        return cls(tokens, _compute_costs(tokens, attention_ratio), attention_ratio, shared)

    def sum_each(self, parts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        return self.sum_joined(*_join(parts))

    def sum_joined(self, members: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sums = np.zeros((2, len(members) + 1), np.int64)
        np.cumsum([self.tokens[members], self.costs[members]], axis=1, out=sums[:, 1:])
        if self.shared is not None:
            saved = self.shared.measure(members, bounds[:-1])
            sums[:, 1:] -= np.cumsum([saved, _compute_costs(saved, self.attention_ratio)], axis=1)
        tokens, costs = np.diff(sums[:, bounds])
        return tokens, costs

    def list_groups(self) -> list[list[int]]:
        assert self.shared is not None
        order = np.argsort(self.shared.places)
        starts = np.flatnonzero(self.shared.num_shared == 0)
        return [part.tolist() for part in np.split(order, starts[1:])] if len(order) else []


def _join(parts: Sequence[Sequence[int]]) -> _Joined:
    bounds = np.cumsum([0, *map(len, parts)])
    return np.fromiter(chain.from_iterable(parts), np.int64, int(bounds[-1])), bounds


def _number(bounds: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def _cut(members: list[int], saved: list[int]) -> list[list[int]]:
    """Cut at least two sequences into parts, each with a longer common prefix than the whole."""
    least = min(saved[1:])  # tokens shared with the previous member, which the first does not have
    starts = [0, *(i for i in range(1, len(members)) if saved[i] == least)]
    return [members[i:j] for i, j in pairwise([*starts, len(members)])]


def _compute_costs(tokens: np.ndarray, attention_ratio: float) -> np.ndarray:
    return np.rint(_COST_SCALE * (tokens + attention_ratio * tokens.astype(np.float64) ** 2)).astype(np.int64)


def plan_microbatches(
    lengths: Sequence[int],
    *,
    dp_size: int,
    max_tokens: int,
    count_multiple: int = 1,
    attention_ratio: float = 0.0,
    shared: SharedPrefixes | None = None,
) -> MicrobatchPlan:
    """Split sequences into microbatches of at most `max_tokens` tokens, balanced over DP ranks by cost.

    Longest-processing-time-first by tokens into `dp_size * k` bins, for the smallest k that fits; bins are dealt to the
    DP ranks by cost; then ranks exchange sequences. With `shared`, groups of sequences with a common prefix are packed
    instead.

    Args:
        lengths: tokens of each sequence, including its prompt.
        count_multiple: divisor of the microbatches per rank.
        attention_ratio: see `compute_attention_ratio`; 0 balances tokens.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(f"a sequence of {longest} tokens does not fit into a microbatch of {max_tokens}")
    work = _Workload.measure(lengths, attention_ratio, shared)
    arrange = partial(_plan_units, work=work, dp_size=dp_size, max_tokens=max_tokens, count_multiple=count_multiple)
    singles = [[i] for i in range(len(lengths))]
    if shared is None:
        return _spell_out(arrange(singles), dp_size)
    units = _split_groups(work, max_tokens)
    plan = arrange(units)
    longest = int(work.costs.max(initial=0))
    fully_shared = work.costs.sum() - _compute_costs(shared.num_shared, attention_ratio).sum()
    least = max(longest, int(fully_shared) / dp_size)  # lower bound of the heaviest rank's cost
    fewest = _round_up(-(-sum(lengths) // (dp_size * max_tokens)), count_multiple)  # microbatches per rank, plain
    loads = _rank_costs(plan, work, dp_size)
    if max(loads) <= _CLOSE * least and len(plan[1]) - 1 <= dp_size * fewest:
        return _spell_out(plan, dp_size)
    plain = arrange(singles)
    plain_cost = max(_rank_costs(plain, work, dp_size))
    if plain_cost > _CLOSE * longest:
        plan, loads = _divide_groups(units, plan, loads, work, arrange)
    cost, has_fewer = max(loads), len(plain[1]) < len(plan[1])
    is_plain = plain_cost <= (cost * _CLOSE if has_fewer else cost / _CLOSE)
    return _spell_out(plain if is_plain else plan, dp_size)


def _divide_groups(
    units: list[list[int]],
    plan: _Joined,
    loads: list[int],
    work: _Workload,
    arrange: Callable[[list[list[int]]], _Joined],
) -> tuple[_Joined, list[int]]:
    for _ in range(min(2 * len(loads), _MOST_ROUNDS)):
        if max(loads) <= max(_CLOSE * sum(loads) / len(loads), int(work.costs.max(initial=0))):
            break
        divided = _divide_overloaded(units, plan, loads, work)
        if divided is None:
            break
        better = arrange(divided)
        better_loads = _rank_costs(better, work, len(loads))
        if max(better_loads) >= max(loads):
            break
        units, plan, loads = divided, better, better_loads
    return plan, loads


def _split_groups(work: _Workload, max_tokens: int) -> list[list[int]]:
    groups = work.list_groups()
    sizes = work.sum_each(groups)[0].tolist()
    return [
        unit
        for group, size in zip(groups, sizes, strict=True)
        for unit in ([group] if size <= max_tokens else _split_group(group, work, max_tokens))
    ]


def _split_group(members: list[int], work: _Workload, max_tokens: int) -> list[list[int]]:
    assert work.shared is not None
    saved = work.shared.measure(members).tolist()
    parts, common = _cut(members, saved), min(saved[1:])
    sizes = (work.sum_each(parts)[0] - common).tolist()
    small = [i for i, size in enumerate(sizes) if size <= max_tokens - common]
    bins = _fill_fewest_bins([sizes[i] for i in small], max_tokens - common)
    units = [[index for i in found for index in parts[small[i]]] for found in bins if found]
    large = [part for part, size in zip(parts, sizes, strict=True) if size > max_tokens - common]
    return [*units, *(unit for part in large for unit in _split_group(part, work, max_tokens))]


def _divide_overloaded(
    units: list[list[int]], plan: _Joined, loads: list[int], work: _Workload, few_ranks: int = _FEW_RANKS
) -> list[list[int]] | None:
    """Split the costliest divisible unit of each overloaded rank (of few, only the heaviest's, in two), if any."""
    assert work.shared is not None
    members, bounds = _join(units)
    share, costs, firsts = sum(loads) / len(loads), work.sum_joined(members, bounds)[1], members[bounds[:-1]]
    is_overloaded = np.asarray(loads) > _CLOSE * share
    if np.count_nonzero(is_overloaded) <= few_ranks:
        is_overloaded &= np.arange(len(loads)) == loads.index(max(loads))
        share = math.inf
    rank_of = np.empty(len(work.tokens), np.int64)
    rank_of[plan[0]] = _number(plan[1][:: (len(plan[1]) - 1) // len(loads)])
    ranks = rank_of[firsts]
    some = np.flatnonzero(is_overloaded[ranks] & (np.diff(bounds) > 1))
    some = some[np.lexsort((firsts[some], -costs[some], ranks[some]))]
    if not len(some):
        return None
    chosen = np.sort(some[np.flatnonzero(np.diff(ranks[some], prepend=-1))]).tolist()  # costliest unit per rank
    members, bounds = _join([units[u] for u in chosen])
    saved = work.shared.measure(members, bounds[:-1]).tolist()
    parts = [_cut(units[u], saved[i:j]) for u, (i, j) in zip(chosen, pairwise(bounds.tolist()), strict=True)]
    part_costs = iter(work.sum_each([*chain.from_iterable(parts)])[1].tolist())
    is_whole = np.ones(len(units), bool)
    is_whole[chosen] = False
    divided = [units[u] for u in np.flatnonzero(is_whole).tolist()]
    for u, pieces in zip(chosen, parts, strict=True):
        bins = _fill_bins([*islice(part_costs, len(pieces))], max(2, math.ceil(int(costs[u]) / share)))
        assert bins is not None, "bins without a limit hold anything"
        divided += [[i for piece in found for i in pieces[piece]] for found in bins if found]
    return divided


def _plan_units(units: list[list[int]], work: _Workload, dp_size: int, max_tokens: int, count_multiple: int) -> _Joined:
    tokens, costs = work.sum_each(units)
    bins = _fill_fewest_bins(tokens.tolist(), max_tokens, dp_size, count_multiple)
    ranks = _deal(bins, costs.tolist(), dp_size)
    balance_ranks(ranks, tokens, costs, max_tokens)
    order, bounds = _join([*chain.from_iterable(ranks)])
    members, parts = _join([units[unit] for unit in order.tolist()])
    places = members if work.shared is None else work.shared.places[members]
    return members[np.argsort(_number(parts[bounds]) * len(members) + places)], parts[bounds]


def _spell_out(plan: _Joined, dp_size: int) -> MicrobatchPlan:
    members, bounds = (array.tolist() for array in plan)
    microbatches = [members[i:j] for i, j in pairwise(bounds)]
    count = len(microbatches) // dp_size
    return [microbatches[i : i + count] for i in range(0, len(microbatches), count)]


def _fill_fewest_bins(
    lengths: list[int], max_tokens: int, multiple: int = 1, count_multiple: int = 1
) -> list[list[int]]:
    enough = -(-sum(lengths) // max_tokens) if max_tokens else 1
    alone = sum(2 * length > max_tokens for length in lengths)  # no two of these fit into one bin
    k = first = _round_up(-(-max(enough, alone) // multiple), count_multiple)
    for k in range(first, first + _TRIED_ONE_BY_ONE * count_multiple, count_multiple):
        if (bins := _fill_bins(lengths, multiple * k, max_tokens)) is not None:
            return bins
    step = count_multiple
    while (bins := _fill_bins(lengths, multiple * (k + step), max_tokens)) is None:
        k, step = k + step, 2 * step
    while step > count_multiple:  # k does not fit, k + step does
        half = step // count_multiple // 2 * count_multiple
        found = _fill_bins(lengths, multiple * (k + half), max_tokens)
        k, step, bins = (k + half, step - half, bins) if found is None else (k, half, found)
    return bins


def _round_up(count: int, multiple: int) -> int:
    return -(-max(1, count) // multiple) * multiple


def _fill_bins(lengths: list[int], num_bins: int, max_tokens: int | None = None) -> list[list[int]] | None:
    """Put the longest first into the emptiest bin; `None` if a bin overflows."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [*range(num_bins)]  # load * num_bins + bin
    limit = math.inf if max_tokens is None else (max_tokens + 1) * num_bins
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        key = heap[0] + lengths[index] * num_bins
        if key >= limit:
            return None
        heapq.heapreplace(heap, key)
        bins[key % num_bins].append(index)
    return [sorted(members) for members in bins]


def _deal(bins: list[list[int]], unit_costs: list[int], dp_size: int) -> list[list[list[int]]]:
    """Deal the heaviest remaining bin to the lightest unfilled rank."""
    ranks: list[list[list[int]]] = [[] for _ in range(dp_size)]
    costs = [sum([unit_costs[unit] for unit in members]) for members in bins]
    by_cost = [(-cost, members) for cost, members in zip(costs, bins, strict=True)]
    order = sorted(range(len(bins)), key=by_cost.__getitem__)
    if len(bins) == dp_size:  # one bin per rank
        return [[bins[b]] for b in order]
    heap = [*range(dp_size)]  # load * dp_size + rank
    for b in order:
        key = heapq.heappop(heap)
        rank = key % dp_size
        ranks[rank].append(bins[b])
        if len(ranks[rank]) < len(bins) // dp_size:
            heapq.heappush(heap, key + costs[b] * dp_size)
    return ranks


def _rank_costs(plan: _Joined, work: _Workload, dp_size: int) -> list[int]:
    return work.sum_joined(*plan)[1].reshape(dp_size, -1).sum(1).tolist()


def microbatch_sizes(plan: MicrobatchPlan, lengths: Sequence[int], shared: SharedPrefixes | None = None) -> list[int]:
    """Return the tokens of all microbatches of a plan, without padding."""
    work = _Workload.measure(lengths, 0.0, shared)
    return work.sum_each([members for rank in plan for members in rank])[0].tolist()


def packing_metrics(
    plan: MicrobatchPlan,
    lengths: Sequence[int],
    max_tokens: int,
    *,
    pad: Callable[[int], int] = lambda size: max(size, 1),
    attention_ratio: float = 0.0,
    shared: SharedPrefixes | None = None,
) -> dict[str, float]:
    """Measure how well a plan packs its sequences; `pad` is `Padding.find_size`, the rest as for `plan_microbatches`.

    A prefix that sequences of a microbatch share counts once, except in padded_efficiency.

    Returns:
        packing/efficiency: tokens without padding / tokens with padding.
        packing/padded_efficiency: the same ratio if every sequence were padded to the longest, without packing.
        packing/budget_use: tokens without padding / (number of microbatches * `max_tokens`).
        packing/imbalance: cost of the most expensive DP rank / mean cost of a DP rank.
        packing/<shared.name>_repeats: only with `shared`; shareable tokens computed / distinct ones (1 is ideal).
    """
    work = _Workload.measure(lengths, attention_ratio, shared)
    microbatches = [members for rank in plan for members in rank]
    sizes = work.sum_each(microbatches)[0].tolist()
    loads = _rank_costs(_join(microbatches), work, len(plan))
    metrics = {
        "packing/efficiency": sum(sizes) / sum(map(pad, sizes)),
        "packing/padded_efficiency": sum(lengths) / max(len(lengths) * max(lengths, default=0), 1),
        "packing/budget_use": sum(sizes) / (len(microbatches) * max_tokens),
        "packing/imbalance": max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0,
    }
    if shared is not None:
        total = int(shared.shareable.sum())
        members, bounds = _join(microbatches)
        executed = total - int(shared.measure(members, bounds[:-1]).sum())
        unique = total - int(shared.num_shared.sum())
        metrics[f"packing/{shared.name}_repeats"] = executed / unique if unique else 1.0
    return metrics
