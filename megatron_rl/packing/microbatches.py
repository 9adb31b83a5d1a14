# SPDX-License-Identifier: Apache-2.0
"""Which sequence goes into which microbatch of which DP rank (pure).

Invariants (asserted in tests/packing/test_microbatches.py):

* every sequence is in exactly one microbatch;
* no microbatch exceeds the token budget, a shared prefix counted once per microbatch;
* every DP rank has the same number of microbatches (pipeline schedules need it), a multiple of
  `count_multiple`; there are as few as the heuristic finds, so some may be empty when sequences are few;
* inside a microbatch sequences keep their order, that of `SharedPrefixes` where prefixes are shared, so that what is
  computed can be put back by `TrainBatch.sequence_ids`;
* sequences that share a prefix are taken apart only if they exceed the budget, or if that lowers the cost of the
  heaviest rank, and where they share least;
* the result depends on the lengths only (costs are whole numbers): every rank computes the same plan.

The cost of a sequence of s tokens is s + attention_ratio * s^2: everything that is linear in the tokens, plus
causal attention.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.packing.balancing import balance_ranks
from megatron_rl.packing.buckets import Buckets
from megatron_rl.packing.prefix import SharedPrefixes
from megatron_rl.parallel.batch_invariant import MIN_ROWS

MicrobatchPlan = list[list[list[int]]]  # [dp_size][num_microbatches] -> indices of sequences

_COST_SCALE = 1024  # costs are whole numbers of this fraction of a token's linear cost
_TRIED_ONE_BY_ONE = 64  # numbers of bins, before the smallest that fits is bisected
_GOOD_IMBALANCE = 1.05  # groups are taken apart to get below it


def find_pad_multiple(cp_size: int, sp_size: int, batch_invariant: bool) -> int:
    """What the rows of a microbatch are a multiple of: all shards are equal, and have the rows that a product needs."""
    return cp_size * math.lcm(sp_size, MIN_ROWS if batch_invariant else 1)


def compute_attention_ratio(num_linear: float, num_heads: int, key_dim: int, value_dim: int) -> float:
    """Cost of causal attention over s tokens in units of s^2 tokens' linear layers.

    Multiply-adds of one layer: s^2 n (d + d_v) / 2 for scores and values together (half of them are masked), against
    s times the elements of its matrices. The output layer and norms are left out.

    Args:
        num_linear: matrix elements that a token passes in a layer; in a mixture, only in its own experts.
        num_heads: n, of queries.
        key_dim, value_dim: d and d_v, channels of a head.
    """
    return num_heads * (key_dim + value_dim) / 2 / num_linear


@dataclass(frozen=True)
class _Workload:
    """Tokens and cost of sequences that are packed together, [num_sequences] each, and what sharing saves."""

    tokens: np.ndarray
    costs: np.ndarray
    attention_ratio: float
    shared: SharedPrefixes | None

    @classmethod
    def measure(cls, lengths: Sequence[int], attention_ratio: float, shared: SharedPrefixes | None) -> _Workload:
        tokens = np.asarray(lengths, np.int64)
        return cls(tokens, _compute_costs(tokens, attention_ratio), attention_ratio, shared)

    def sum(self, members: Sequence[int]) -> tuple[int, int]:
        """Tokens and cost of one microbatch or a part of it, members in their order."""
        tokens, cost = int(self.tokens[members].sum()), int(self.costs[members].sum())
        if self.shared is None or len(members) < 2:
            return tokens, cost
        saved = self.shared.measure(members)
        return tokens - int(saved.sum()), cost - int(_compute_costs(saved, self.attention_ratio).sum())

    def list_groups(self) -> list[list[int]]:
        """Sequences that share something with each other, in their order."""
        assert self.shared is not None
        order = np.argsort(self.shared.places)
        starts = np.flatnonzero(self.shared.num_shared == 0)
        return [part.tolist() for part in np.split(order, starts[1:])] if len(order) else []

    def cut(self, members: Sequence[int]) -> tuple[list[list[int]], list[int], int]:
        """Cut sequences into parts that have more in common than all of them.

        Returns:
            The parts, the tokens of each beyond what all have in common, and how many that are.
        """
        if self.shared is None or len(members) < 2:
            return [[i] for i in members], self.tokens[members].tolist(), 0
        saved = self.shared.measure(members)
        least = int(saved[1:].min())
        saved[0] = least
        starts = np.flatnonzero(saved == least)
        parts = [part.tolist() for part in np.split(np.asarray(members), starts[1:])]
        return parts, np.add.reduceat(self.tokens[members] - saved, starts).tolist(), least


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

    Longest-processing-time-first by tokens into `dp_size * k` bins, for the smallest k that fits; the bins are dealt
    to the DP ranks by cost; then heavy ranks exchange sequences with light ones. With `shared`, groups take the place
    of sequences.

    Args:
        lengths: tokens of each sequence, its prompt included.
        dp_size: data parallel ranks.
        max_tokens: budget of one microbatch; no sequence may be longer.
        count_multiple: the number of microbatches per rank is a multiple of this.
        attention_ratio: see `compute_attention_ratio`; 0 balances tokens.
        shared: what sequences have in common, and is packed once; None packs every sequence whole.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(f"a sequence of {longest} tokens does not fit into a microbatch of {max_tokens}")
    work = _Workload.measure(lengths, attention_ratio, shared)
    if shared is None:
        units = [[i] for i in range(len(lengths))]
    else:
        units = [part for group in work.list_groups() for part in _split_group(group, work, max_tokens)]
    plan = _plan_units(units, work, dp_size, max_tokens, count_multiple)
    loads = _rank_costs(plan, work)
    for _ in range(2 * dp_size):
        halved = _halve_heaviest(units, plan[int(np.argmax(loads))], work)
        if halved is None or max(loads) * dp_size <= _GOOD_IMBALANCE * sum(loads):
            break
        better = _plan_units(halved, work, dp_size, max_tokens, count_multiple)
        better_loads = _rank_costs(better, work)
        if max(better_loads) >= max(loads):
            break
        units, plan, loads = halved, better, better_loads
    return plan


def _split_group(members: list[int], work: _Workload, max_tokens: int) -> list[list[int]]:
    """Sequences that share a prefix, in as few parts as the budget allows."""
    parts, sizes, common = work.cut(members)
    small = [i for i, size in enumerate(sizes) if size <= max_tokens - common]
    bins = _fill_fewest_bins([sizes[i] for i in small], max_tokens - common)
    units = [[index for i in found for index in parts[small[i]]] for found in bins if found]
    large = [part for part, size in zip(parts, sizes, strict=True) if size > max_tokens - common]
    return [*units, *(unit for part in large for unit in _split_group(part, work, max_tokens))]


def _halve_heaviest(units: list[list[int]], rank_plan: list[list[int]], work: _Workload) -> list[list[int]] | None:
    """The units with the costliest one of a rank in two; None if none can be divided."""
    on_rank = {index for members in rank_plan for index in members}
    divisible = [u for u in units if len(u) > 1 and u[0] in on_rank]
    if not divisible:
        return None
    heaviest = max(divisible, key=lambda u: (work.sum(u)[1], -u[0]))
    parts, _, _ = work.cut(heaviest)
    halves = _fill_bins([work.sum(part)[1] for part in parts], 2)
    assert halves is not None, "bins without a limit hold anything"
    return [u for u in units if u is not heaviest] + [[i for part in half for i in parts[part]] for half in halves]


def _plan_units(
    units: list[list[int]], work: _Workload, dp_size: int, max_tokens: int, count_multiple: int
) -> MicrobatchPlan:
    """Bins of units, dealt to ranks, balanced, and spelled out in sequences."""
    sums = np.array([work.sum(unit) for unit in units], np.int64).reshape(-1, 2)
    tokens, costs = sums[:, 0], sums[:, 1]
    bins = _fill_fewest_bins(tokens.tolist(), max_tokens, dp_size, count_multiple)
    ranks = _deal(bins, costs, dp_size)
    balance_ranks(ranks, tokens, costs, max_tokens)
    place = range(len(work.tokens)) if work.shared is None else work.shared.places.tolist()
    return [
        [sorted((i for unit in members for i in units[unit]), key=lambda i: place[i]) for members in rank]
        for rank in ranks
    ]


def _fill_fewest_bins(
    lengths: Sequence[int], max_tokens: int, multiple: int = 1, count_multiple: int = 1
) -> list[list[int]]:
    """Fill the smallest number of bins, `multiple` times a multiple of `count_multiple`, that the heuristic fits.

    Where that is far above what the tokens need, as with sequences of little more than half of a bin, it is bisected.
    """
    lower_bound = -(-sum(lengths) // (multiple * max_tokens)) if max_tokens else 1
    k = first = -(-max(1, lower_bound) // count_multiple) * count_multiple
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


def _fill_bins(lengths: Sequence[int], num_bins: int, max_tokens: int | None = None) -> list[list[int]] | None:
    """Longest first into the emptiest bin; None if a bin overflows."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, b = heapq.heappop(heap)
        if max_tokens is not None and load + lengths[index] > max_tokens:
            return None
        bins[b].append(index)
        heapq.heappush(heap, (load + lengths[index], b))
    return [sorted(members) for members in bins]


def _deal(bins: list[list[int]], costs: np.ndarray, dp_size: int) -> list[list[list[int]]]:
    """Give each rank as many bins: the heaviest remaining bin to the lightest rank that still has room."""
    ranks: list[list[list[int]]] = [[] for _ in range(dp_size)]
    heap = [(0, rank) for rank in range(dp_size)]
    for members in sorted(bins, key=lambda m: (-int(costs[m].sum()), m)):
        load, rank = heapq.heappop(heap)
        ranks[rank].append(members)
        if len(ranks[rank]) < len(bins) // dp_size:
            heapq.heappush(heap, (load + int(costs[members].sum()), rank))
    return ranks


def _rank_costs(plan: MicrobatchPlan, work: _Workload) -> list[int]:
    return [sum(work.sum(members)[1] for members in rank if members) for rank in plan]


def microbatch_sizes(plan: MicrobatchPlan, lengths: Sequence[int], shared: SharedPrefixes | None = None) -> list[int]:
    """Tokens of all microbatches of a plan, without padding."""
    work = _Workload.measure(lengths, 0.0, shared)
    return [work.sum(members)[0] for rank in plan for members in rank]


def packing_metrics(
    plan: MicrobatchPlan,
    lengths: Sequence[int],
    max_tokens: int,
    *,
    pad_multiple: int = 1,
    attention_ratio: float = 0.0,
    shared: SharedPrefixes | None = None,
    buckets: Buckets | None = None,
) -> dict[str, float]:
    """How good a plan is; arguments as for `plan_microbatches` and `build_train_batch`.

    Returns:
        packing/efficiency: real tokens over computed ones (with padding).
        packing/padded_efficiency: what it would be, had every sequence been padded to the longest.
        packing/budget_use: real tokens over microbatches times budget.
        packing/imbalance: cost of the heaviest DP rank over the mean.
        packing/prompt_repeats: with shared prompts, executed over unique prompt tokens (1: each prompt once).
        packing/prefix_repeats: with shared prefixes of all tokens, computed over unique tokens, likewise.
    """
    work = _Workload.measure(lengths, attention_ratio, shared)
    microbatches = [members for rank in plan for members in rank]
    sizes = [work.sum(members)[0] for members in microbatches]
    computed = sum(
        buckets.find_size(size) if buckets else max(-(-size // pad_multiple), 1) * pad_multiple for size in sizes
    )
    loads = _rank_costs(plan, work)
    metrics = {
        "packing/efficiency": sum(sizes) / computed,
        "packing/padded_efficiency": sum(lengths) / max(len(lengths) * max(lengths, default=0), 1),
        "packing/budget_use": sum(sizes) / (len(microbatches) * max_tokens),
        "packing/imbalance": max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0,
    }
    if shared is not None:
        total = int(shared.shareable.sum())
        executed = total - sum(int(shared.measure(members).sum()) for members in microbatches)
        unique = total - int(shared.num_shared.sum())
        metrics[f"packing/{shared.name}_repeats"] = executed / unique if unique else 1.0
    return metrics
