# SPDX-License-Identifier: Apache-2.0
"""Which sequence goes into which microbatch of which DP rank (pure).

Invariants (asserted in tests/data/test_packing.py):

* every sequence is in exactly one microbatch;
* no microbatch exceeds the token budget;
* every DP rank has the same number of microbatches (pipeline schedules need it), a multiple of
  `count_multiple`; there are as few as the heuristic finds, so some may be empty when sequences are few;
* the result depends on the lengths only: every rank computes the same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

MicrobatchPlan = list[list[list[int]]]  # [dp_size][num_microbatches] -> indices of sequences


def plan_microbatches(
    lengths: Sequence[int], *, dp_size: int, max_tokens: int, count_multiple: int = 1
) -> MicrobatchPlan:
    """Split sequences into balanced microbatches of at most `max_tokens` tokens.

    Longest-processing-time-first into `dp_size * k` bins, for the smallest k that fits; then the bins
    are dealt to the DP ranks by size, so that the ranks' loads are close as well.

    Args:
        lengths: tokens of each sequence.
        dp_size: data parallel ranks.
        max_tokens: budget of one microbatch; no sequence may be longer.
        count_multiple: the number of microbatches per rank is a multiple of this.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(f"a sequence of {longest} tokens does not fit into a microbatch of {max_tokens}")
    lower_bound = -(-sum(lengths) // (dp_size * max_tokens))
    k = -(-max(1, lower_bound) // count_multiple) * count_multiple
    bins = _fill_bins(lengths, dp_size * k, max_tokens)
    while bins is None:
        k += count_multiple
        bins = _fill_bins(lengths, dp_size * k, max_tokens)
    return _deal(bins, lengths, dp_size, k)


def _fill_bins(lengths: Sequence[int], num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """Longest first into the emptiest bin; None if a bin overflows."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, b = heapq.heappop(heap)
        if load + lengths[index] > max_tokens:
            return None
        bins[b].append(index)
        heapq.heappush(heap, (load + lengths[index], b))
    return [sorted(members) for members in bins]


def _deal(bins: list[list[int]], lengths: Sequence[int], dp_size: int, k: int) -> MicrobatchPlan:
    """Give each rank k bins: the heaviest remaining bin to the lightest rank that still has room."""
    plan: MicrobatchPlan = [[] for _ in range(dp_size)]
    loads = [0] * dp_size
    for members in sorted(bins, key=lambda m: (-sum(lengths[i] for i in m), m)):
        rank = min((r for r in range(dp_size) if len(plan[r]) < k), key=lambda r: (loads[r], r))
        plan[rank].append(members)
        loads[rank] += sum(lengths[i] for i in members)
    return plan


def packing_metrics(plan: MicrobatchPlan, lengths: Sequence[int], max_tokens: int) -> dict[str, float]:
    """Share of the token budget that is used, and load of the heaviest DP rank over the mean."""
    loads = [sum(lengths[i] for members in rank for i in members) for rank in plan]
    capacity = sum(len(rank) for rank in plan) * max_tokens
    mean = sum(loads) / len(loads)
    return {"packing/efficiency": sum(loads) / capacity, "packing/imbalance": max(loads) / mean if mean else 1.0}
