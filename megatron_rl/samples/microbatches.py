# SPDX-License-Identifier: Apache-2.0
"""Assignment of sequences to microbatches and DP ranks (pure).

Common beginnings of the sequences of a microbatch are computed once:

    plain     [prompt a b c] [prompt a d] [prompt e]
    prompts   [prompt a b c] [a d] [e]
    trees     [prompt a b c] [d] [e]

A bracket is a segment, with causal attention inside. The result equals that of plain packing.

Units (sets of sequences that stay together) fill bins, longest first. The cost of a sequence of s tokens is
s + attention_ratio * s^2: all work linear in the tokens, plus causal attention.

Invariants (asserted in tests/samples/test_microbatches.py):

* every sequence is in exactly one microbatch;
* no microbatch exceeds the token budget, a shared prefix counted once per microbatch;
* every DP rank has the same number of microbatches (pipeline schedules need it), a multiple of `count_multiple`; some
  may be empty;
* inside a microbatch sequences keep their order (that of `SharedPrefixes`, if given);
* sequences that share a prefix are separated, at their shortest common prefix, only if they exceed the budget or
  overload the heaviest rank;
* the heaviest rank costs at most `CLOSE` times that of the plain plan without sharing;
* the result depends on the lengths only (costs are integers): every rank computes the same plan.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from operator import neg
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class SharedPrefixes:
    """Common prefixes of sequences in packing order (the order in which a batch contains them).

    Places i < j share at least min(num_shared[i + 1 : j + 1]) tokens; exactly that if the order walks a prefix tree.
    """

    places: np.ndarray  # [n] int64, place of each sequence in the packing order
    num_shared: np.ndarray  # [n] int64, by place: tokens shared with the previous sequence
    shareable: np.ndarray  # [n] int64, by sequence: its tokens that can be shared (the prompt, or all)
    name: str = "prompt"  # for the metric `packing/<name>_repeats`

    def measure(self, members: Sequence[int] | np.ndarray, firsts: Sequence[int] | np.ndarray = (0,)) -> np.ndarray:
        """Count the leading tokens that each member of a list shares with the member before it: [k] int64, first 0.

        Args:
            members: [k] one or more concatenated lists of sequence indices; each list is sorted by packing order.
            firsts: start of each list in `members`.
        """
        places = self.places[np.asarray(members, np.int64)]
        if not len(places):
            return places
        firsts = np.asarray(firsts)
        firsts = firsts[firsts < len(places)]  # starts at the end are empty lists
        spans = np.repeat(places + 1, 2)  # places from the previous member to this one
        spans[2::2] = spans[1:-1:2]
        spans[2 * firsts] = places[firsts]
        shared = np.minimum.reduceat(np.append(self.num_shared, 0), spans)[::2]
        shared[firsts] = 0
        return shared

    def cut(self, members: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cut each list of sequences (two or more) into parts; a part has a longer common prefix than its list.

        Returns the bounds of the parts in `members`, and the length of each list's common prefix.
        """
        saved = self.measure(members, bounds[:-1])
        saved[bounds[:-1]] = np.iinfo(np.int64).max
        common = np.minimum.reduceat(saved, bounds[:-1])
        is_first = saved == np.repeat(common, np.diff(bounds))
        is_first[bounds[:-1]] = True
        return np.append(np.flatnonzero(is_first), len(members)), common

    def part(self, start: int, stop: int) -> SharedPrefixes:
        """Return the shared prefixes of the sequences [start, stop), renumbered from `start`."""
        order = np.argsort(self.places[start:stop])
        return SharedPrefixes(np.argsort(order), self.measure(start + order), self.shareable[start:stop], self.name)


def share_prompts(group_of: Sequence[int] | np.ndarray, prompt_lengths: Sequence[int] | np.ndarray) -> SharedPrefixes:
    """Share only the prompt between the sequences of a group; groups are packed one after another.

    Args:
        group_of: [n] group number of each sequence.
        prompt_lengths: [n] tokens, equal within a group.
    """
    groups, prompts = np.asarray(group_of, np.int64), np.asarray(prompt_lengths, np.int64)
    order = np.argsort(groups, kind="stable")
    num_shared = np.where(is_repeated(groups[order]), prompts[order], 0)
    return SharedPrefixes(np.argsort(order), num_shared, prompts)


def is_repeated(values: np.ndarray) -> np.ndarray:
    """Return whether each value equals its predecessor, [n] bool."""
    return np.concatenate([np.zeros(min(len(values), 1), bool), values[1:] == values[:-1]])


Joined = tuple[np.ndarray, np.ndarray]  # concatenated members of parts, and the bounds of the parts

_COST_SCALE = 1024  # units of cost per token of linear work; costs are integers
_TRIED_ONE_BY_ONE = 64  # numbers of bins, before bisection starts
CLOSE = 1.05  # costs within this ratio count as equal


@dataclass(frozen=True)
class PackingWork:
    """Tokens and costs [num_sequences] of sequences that are packed together."""

    tokens: np.ndarray
    costs: np.ndarray
    attention_ratio: float
    shared: SharedPrefixes | None

    @classmethod
    def measure(cls, lengths: Sequence[int], attention_ratio: float, shared: SharedPrefixes | None) -> PackingWork:
        """Compute the costs of sequences of the given numbers of tokens."""
        tokens = np.asarray(lengths, np.int64)
        return cls(tokens, compute_costs(tokens, attention_ratio), attention_ratio, shared)

    def sum_joined(self, members: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sum the tokens and the costs of each part of `Joined` sequences, a shared prefix counted once per part."""
        sums = np.zeros((2, len(members) + 1), np.int64)
        tokens, costs = sums[:, 1:]
        tokens[:], costs[:] = self.tokens[members], self.costs[members]
        if self.shared is not None:
            saved = self.shared.measure(members, bounds[:-1])
            tokens -= saved
            costs -= compute_costs(saved, self.attention_ratio)
        ends = sums.cumsum(1)[:, bounds]
        return tuple(ends[:, 1:] - ends[:, :-1])

    def sum_by_rank(self, plan: Joined, dp_size: int) -> list[int]:
        """Sum the costs of each DP rank; parts of the plan are microbatches, equally many and adjacent per rank."""
        return self.sum_joined(*plan)[1].reshape(dp_size, -1).sum(1).tolist()


class Units(NamedTuple):
    """Sets of sequences that stay together ("units"): concatenated `members`, tokens and costs [num_units]."""

    members: np.ndarray
    bounds: np.ndarray
    tokens: np.ndarray
    costs: np.ndarray

    @classmethod
    def measure(cls, work: PackingWork, members: np.ndarray, bounds: np.ndarray) -> Units:
        """Build units from `Joined` sequences."""
        return cls(members, bounds, *work.sum_joined(members, bounds))

    def replace(self, is_replaced: np.ndarray, parts: Units) -> Units:
        """Return the units without those in the mask `is_replaced`, [num_units], and then `parts`."""
        sizes, is_kept = np.diff(self.bounds), ~is_replaced
        return Units(
            np.append(self.members[np.repeat(is_kept, sizes)], parts.members),
            np.concatenate([[0], np.cumsum(sizes[is_kept]), len(self.members) - len(parts.members) + parts.bounds[1:]]),
            np.append(self.tokens[is_kept], parts.tokens),
            np.append(self.costs[is_kept], parts.costs),
        )


def compute_costs(tokens: np.ndarray, attention_ratio: float) -> np.ndarray:
    """Return the cost of sequences of the given numbers of tokens, int64."""
    return np.rint(_COST_SCALE * (tokens + attention_ratio * tokens.astype(np.float64) ** 2)).astype(np.int64)


def fill_fewest_bins(
    lengths: np.ndarray, max_tokens: int, multiple: int = 1, count_multiple: int = 1
) -> tuple[np.ndarray, int]:
    """Pack lengths into the fewest bins of `max_tokens`; return the bin of each and the number of bins."""
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order].tolist()
    enough = -(-sum(longest_first) // max_tokens) if max_tokens else 1
    alone = int(np.count_nonzero(2 * lengths > max_tokens))  # no two of these fit into one bin
    k = first = round_up(-(-max(enough, alone) // multiple), count_multiple)

    def fill(k: int) -> list[int] | None:
        return fill_bins(longest_first, multiple * k, max_tokens)

    step, last = count_multiple, first + (_TRIED_ONE_BY_ONE - 1) * count_multiple
    while (bins := fill(k)) is None and k < last:
        k += step
    if bins is None:
        while (bins := fill(k + step)) is None:
            k, step = k + step, 2 * step
        while step > count_multiple:  # k does not fit, k + step does
            half = step // count_multiple // 2 * count_multiple
            found = fill(k + half)
            k, step, bins = (k + half, step - half, bins) if found is None else (k, half, found)
        k += step
    bin_of = np.empty(len(lengths), np.int64)
    bin_of[order] = bins
    return bin_of, multiple * k


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `count`, and positive."""
    return -(-max(1, count) // multiple) * multiple


def fill_bins(longest_first: list[int], num_bins: int, max_tokens: int | None = None) -> list[int] | None:
    """Put each length into the emptiest bin, and return its number; `None` if a bin overflows."""
    limit = math.inf if max_tokens is None else (max_tokens + 1) * num_bins
    if longest_first and longest_first[0] * num_bins >= limit:
        return None
    alone = min(num_bins, bisect_left(longest_first, 0, key=neg))  # the longest go into empty bins
    bins = [*range(alone)]
    heap = [length * num_bins + b for b, length in enumerate(longest_first[:alone])] + [*range(alone, num_bins)]
    heapq.heapify(heap)  # load * num_bins + bin
    for length in longest_first[alone:]:
        key = heap[0] + length * num_bins
        if key >= limit:
            return None
        heapq.heapreplace(heap, key)
        bins.append(key % num_bins)
    return bins


def find_bounds(part_of: np.ndarray, num_parts: int) -> np.ndarray:
    """Return the start of each part (value of `part_of`) in sorted order, and the total count, [num_parts + 1]."""
    bounds = np.zeros(num_parts + 1, np.int64)
    np.bincount(part_of, minlength=num_parts).cumsum(out=bounds[1:])
    return bounds


def deal(bin_of: np.ndarray, num_bins: int, unit_costs: np.ndarray, dp_size: int) -> np.ndarray:
    """Deal bins, heaviest first, to the lightest unfilled rank; return new bin numbers, adjacent within a rank."""
    costs, firsts = np.zeros(num_bins, np.int64), np.full(num_bins, -1)
    np.add.at(costs, bin_of, unit_costs)
    firsts[bin_of[::-1]] = np.arange(len(bin_of))[::-1]
    order = np.lexsort((firsts, -costs))
    numbers, count = np.empty(num_bins, np.int64), num_bins // dp_size
    if count == 1:
        numbers[order] = np.arange(num_bins)
        return numbers
    heap, filled, cost_list = [*range(dp_size)], [0] * dp_size, costs.tolist()  # load * dp_size + rank
    for b in order.tolist():
        key = heapq.heappop(heap)
        rank = key % dp_size
        numbers[b] = rank * count + filled[rank]
        filled[rank] += 1
        if filled[rank] < count:
            heapq.heappush(heap, key + cost_list[b] * dp_size)
    return numbers


MicrobatchPlan = list[list[list[int]]]  # [dp_size][num_microbatches] -> indices of sequences


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


def _join(parts: Iterable[Sequence[int]]) -> Joined:
    parts = list(parts)
    bounds = np.cumsum([0, *map(len, parts)])
    return np.fromiter(chain.from_iterable(parts), np.int64, int(bounds[-1])), bounds


def plan_microbatches(
    lengths: Sequence[int],
    *,
    dp_size: int,
    max_tokens: int,
    count_multiple: int = 1,
    attention_ratio: float = 0.0,
    shared: SharedPrefixes | None = None,
    whole: np.ndarray | None = None,
) -> MicrobatchPlan:
    """Split sequences into microbatches of at most `max_tokens` tokens, balanced over DP ranks by cost.

    Longest-processing-time-first by tokens into `dp_size * k` bins, for the smallest k that fits; each bin goes to any
    DP rank, by cost. With `shared`, sequences with a common prefix stay together if the balance allows it, and the cost
    of the prefix counts once per microbatch.

    Args:
        lengths: tokens of each sequence of all ranks, including its prompt.
        count_multiple: divisor of the microbatches per rank.
        attention_ratio: see `compute_attention_ratio`; 0 balances tokens.
        whole: bounds of runs of sequences that stay together, such as pairs; each fits into the budget.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(f"a sequence of {longest} tokens does not fit into a microbatch of {max_tokens}")
    work = PackingWork.measure(lengths, attention_ratio, shared)
    arrange = partial(_plan_units, work=work, dp_size=dp_size, max_tokens=max_tokens, count_multiple=count_multiple)
    bounds = np.arange(len(lengths) + 1) if whole is None else whole
    places = np.arange(len(lengths)) if shared is None else shared.places
    members = np.lexsort((places, np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))))
    singles = Units.measure(work, members, bounds)
    if shared is None or whole is not None:
        return _spell_out(arrange(singles), dp_size)
    units = _split_groups(work, max_tokens)
    plan = arrange(units)
    longest = int(work.costs.max(initial=0))
    fully_shared = work.costs.sum() - compute_costs(shared.num_shared, attention_ratio).sum()
    least = max(longest, int(fully_shared) / dp_size)  # lower bound of the heaviest rank's cost
    fewest = round_up(-(-sum(lengths) // (dp_size * max_tokens)), count_multiple)  # microbatches per rank, plain
    loads = work.sum_by_rank(plan, dp_size)
    if max(loads) <= CLOSE * least and len(plan[1]) - 1 <= dp_size * fewest:
        return _spell_out(plan, dp_size)
    plain = arrange(singles)
    plain_cost = max(work.sum_by_rank(plain, dp_size))
    if dp_size > 1 and plain_cost > CLOSE * longest:
        plan, loads = divide_groups(units, plan, loads, work, arrange)
    cost, has_fewer = max(loads), len(plain[1]) < len(plan[1])
    is_plain = plain_cost <= (cost * CLOSE if has_fewer else cost / CLOSE)
    return _spell_out(plain if is_plain else plan, dp_size)


def _split_groups(work: PackingWork, max_tokens: int) -> Units:
    assert work.shared is not None
    starts = np.flatnonzero(work.shared.num_shared == 0)
    groups = Units.measure(work, np.argsort(work.shared.places), np.append(starts, len(work.tokens)))
    is_large = groups.tokens > max_tokens
    if not is_large.any():
        return groups
    units: list[list[int]] = []
    for members, split in zip(np.split(groups.members, starts[1:]), is_large.tolist(), strict=True):
        units += _split_group(members, work, max_tokens) if split else [members.tolist()]
    return Units.measure(work, *_join(units))


def _split_group(members: np.ndarray, work: PackingWork, max_tokens: int) -> list[list[int]]:
    assert work.shared is not None
    bounds, common = work.shared.cut(members, np.array([0, len(members)]))
    parts, common = np.split(members, bounds[1:-1]), int(common[0])
    sizes = work.sum_joined(members, bounds)[0] - common
    small = np.flatnonzero(sizes <= max_tokens - common)
    bin_of, num_bins = fill_fewest_bins(sizes[small], max_tokens - common)
    units: list[list[int]] = [[] for _ in range(num_bins)]
    for part, into in zip(small.tolist(), bin_of.tolist(), strict=True):
        units[into] += parts[part].tolist()
    large = [parts[i] for i in np.flatnonzero(sizes > max_tokens - common).tolist()]
    return [*filter(None, units), *(unit for part in large for unit in _split_group(part, work, max_tokens))]


def _plan_units(units: Units, work: PackingWork, dp_size: int, max_tokens: int, count_multiple: int) -> Joined:
    members, bounds, tokens, costs = units
    bin_of, num_bins = fill_fewest_bins(tokens, max_tokens, dp_size, count_multiple)
    bin_of = deal(bin_of, num_bins, costs, dp_size)[bin_of]
    if dp_size > 1:
        from megatron_rl.samples.balancing import balance_ranks

        balance_ranks(bin_of, num_bins, dp_size, tokens, costs, max_tokens)
    bin_of = np.repeat(bin_of, np.diff(bounds))
    places = members if work.shared is None else work.shared.places[members]
    return members[np.argsort(bin_of * len(members) + places)], find_bounds(bin_of, num_bins)


def _spell_out(plan: Joined, dp_size: int) -> MicrobatchPlan:
    members, bounds = (array.tolist() for array in plan)
    microbatches = [members[i:j] for i, j in pairwise(bounds)]
    count = len(microbatches) // dp_size
    return [microbatches[i : i + count] for i in range(0, len(microbatches), count)]


def microbatch_sizes(plan: MicrobatchPlan, lengths: Sequence[int], shared: SharedPrefixes | None = None) -> list[int]:
    """Return the tokens of all microbatches of a plan, without padding."""
    work = PackingWork.measure(lengths, 0.0, shared)
    return work.sum_joined(*_join(chain.from_iterable(plan)))[0].tolist()


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
    work = PackingWork.measure(lengths, attention_ratio, shared)
    members, bounds = joined = _join(chain.from_iterable(plan))
    sizes = work.sum_joined(*joined)[0].tolist()
    loads = work.sum_by_rank(joined, len(plan))
    metrics = {
        "packing/efficiency": sum(sizes) / sum(map(pad, sizes)),
        "packing/padded_efficiency": sum(lengths) / max(len(lengths) * max(lengths, default=0), 1),
        "packing/budget_use": sum(sizes) / (len(sizes) * max_tokens),
        "packing/imbalance": max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0,
    }
    if shared is not None:
        total = int(shared.shareable.sum())
        executed = total - int(shared.measure(members, bounds[:-1]).sum())
        unique = total - int(shared.num_shared.sum())
        metrics[f"packing/{shared.name}_repeats"] = executed / unique if unique else 1.0
    return metrics


_MOST_ROUNDS = 16  # rounds of splitting groups of overloaded ranks
_FEW_RANKS = 8  # up to this many overloaded ranks, groups are split one at a time


def divide_groups(
    units: Units, plan: Joined, loads: list[int], work: PackingWork, arrange: Callable[[Units], Joined]
) -> tuple[Joined, list[int]]:
    """Split units of overloaded DP ranks, round by round, until the costliest rank no longer gets cheaper.

    Args:
        plan, loads: the plan of `units`, and the cost of each rank in it.
        arrange: returns the plan of other units.

    Returns:
        The best plan, and its loads.
    """
    for _ in range(min(2 * len(loads), _MOST_ROUNDS)):
        if max(loads) <= max(CLOSE * sum(loads) / len(loads), int(work.costs.max(initial=0))):
            break
        divided = _divide_overloaded(units, plan, loads, work)
        if divided is None:
            break
        better = arrange(divided)
        better_loads = work.sum_by_rank(better, len(loads))
        if max(better_loads) >= max(loads):
            break
        units, plan, loads = divided, better, better_loads
    return plan, loads


def _divide_overloaded(
    units: Units, plan: Joined, loads: list[int], work: PackingWork, few_ranks: int = _FEW_RANKS
) -> Units | None:
    """Split the costliest divisible unit of each overloaded rank; return `None` if none is divisible.

    If at most `few_ranks` are overloaded, only the heaviest rank's unit is split, in two.
    """
    assert work.shared is not None
    members, bounds, _, costs = units
    sizes, share, firsts = np.diff(bounds), sum(loads) / len(loads), members[bounds[:-1]]
    is_overloaded = np.asarray(loads) > CLOSE * share
    if np.count_nonzero(is_overloaded) <= few_ranks:
        is_overloaded &= np.arange(len(loads)) == loads.index(max(loads))
        share = math.inf
    rank_of = np.empty(len(work.tokens), np.int64)
    bounds_of_ranks = plan[1][:: (len(plan[1]) - 1) // len(loads)]
    rank_of[plan[0]] = np.repeat(np.arange(len(loads)), np.diff(bounds_of_ranks))
    ranks = rank_of[firsts]
    some = np.flatnonzero(is_overloaded[ranks] & (sizes > 1))
    some = some[np.lexsort((firsts[some], -costs[some], ranks[some]))]
    if not len(some):
        return None
    is_divided = np.zeros(len(sizes), bool)
    is_divided[some[np.flatnonzero(np.diff(ranks[some], prepend=-1))]] = True  # costliest unit per rank
    is_moved = np.repeat(is_divided, sizes)
    moved, ends = members[is_moved], np.append(0, np.cumsum(sizes[is_divided]))
    starts, _ = work.shared.cut(moved, ends)
    unit_of = np.searchsorted(ends, starts[:-1], "right") - 1
    num_bins = np.maximum(2, np.ceil(costs[is_divided] / share)).astype(np.int64)
    bin_of = _fill_bins_of_each(work.sum_joined(moved, starts)[1], unit_of, num_bins)
    part_of = np.unique(unit_of * num_bins.max() + bin_of, return_inverse=True)[1]
    part_of = np.repeat(part_of, np.diff(starts))
    order, starts = np.argsort(part_of, kind="stable"), find_bounds(part_of, int(part_of.max()) + 1)
    return units.replace(is_divided, Units.measure(work, moved[order], starts))


def _fill_bins_of_each(lengths: np.ndarray, part_of: np.ndarray, num_bins: np.ndarray) -> np.ndarray:
    """Put each length [n] into the emptiest bin of its part, longest first; `num_bins` is by part."""
    order, bounds = np.lexsort((-lengths, part_of)), find_bounds(part_of, len(num_bins))
    bin_of = np.empty(len(lengths), np.int64)
    for (i, j), number in zip(pairwise(bounds.tolist()), num_bins.tolist(), strict=True):
        bins = fill_bins(lengths[order[i:j]].tolist(), number)
        assert bins is not None, "bins without a limit hold anything"
        bin_of[order[i:j]] = bins
    return bin_of
