# SPDX-License-Identifier: Apache-2.0
"""Which sequence goes into which microbatch of which DP rank (pure).

Invariants (asserted in tests/packing/test_microbatches.py):

* every sequence is in exactly one microbatch;
* no microbatch exceeds the token budget, a shared prompt counted once per group and microbatch;
* every DP rank has the same number of microbatches (pipeline schedules need it), a multiple of
  `count_multiple`; there are as few as the heuristic finds, so some may be empty when sequences are few;
* inside a microbatch sequences keep their order, group after group where prompts are shared, so that what is
  computed can be put back by `TrainBatch.sequence_ids`;
* a group is taken apart only if it exceeds the budget, or if that lowers the cost of the heaviest rank;
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
from megatron_rl.packing.prefix import SharedPrompts
from megatron_rl.parallel.batch_invariant import MIN_ROWS

MicrobatchPlan = list[list[list[int]]]  # [dp_size][num_microbatches] -> indices of sequences

_COST_SCALE = 1024  # costs are whole numbers of this fraction of a token's linear cost
_TRIED_ONE_BY_ONE = 64  # numbers of bins, before the smallest that fits is bisected
_GOOD_IMBALANCE = 1.05  # groups are taken apart to get below it


def find_pad_multiple(cp_size: int, sp_size: int, batch_invariant: bool) -> int:
    """What the rows of a microbatch are a multiple of: all shards are equal, and have the rows that a product needs."""
    return cp_size * math.lcm(sp_size, MIN_ROWS if batch_invariant else 1)


def compute_attention_ratio(
    hidden_size: int, ffn_hidden_size: float, num_heads: int, num_kv_heads: int, head_dim: int
) -> float:
    """Cost of causal attention over s tokens in units of s^2 tokens' linear layers.

    Multiply-adds of one layer: s^2 n d for scores and values together (half of them are masked), against
    s h (2 n d + 2 ng d + 3 ffn) for the projections and the gated MLP. The output layer and norms are left out.

    Args:
        ffn_hidden_size: columns that a token passes: of one expert times the experts per token in a mixture.
    """
    linear = hidden_size * (2 * (num_heads + num_kv_heads) * head_dim + 3 * ffn_hidden_size)
    return num_heads * head_dim / linear


@dataclass(frozen=True)
class _Workload:
    """Tokens and cost of sequences that are packed together: [num_sequences] each, and what sharing a prompt saves."""

    tokens: np.ndarray
    costs: np.ndarray
    prompt_tokens: np.ndarray
    prompt_costs: np.ndarray
    group_of: Sequence[int] | None

    @classmethod
    def measure(cls, lengths: Sequence[int], attention_ratio: float, shared: SharedPrompts | None) -> _Workload:
        def cost(tokens: np.ndarray) -> np.ndarray:
            return np.rint(_COST_SCALE * (tokens + attention_ratio * tokens.astype(np.float64) ** 2)).astype(np.int64)

        tokens = np.asarray(lengths, np.int64)
        prompts = np.asarray(shared.prompt_lengths if shared else np.zeros(len(tokens)), np.int64)
        return cls(tokens, cost(tokens), prompts, cost(prompts), shared.group_of if shared else None)

    def sum(self, members: Sequence[int]) -> tuple[int, int]:
        """Tokens and cost of one microbatch or a part of it."""
        repeats = self._repeats(members)
        tokens = self.tokens[members].sum() - self.prompt_tokens[repeats].sum()
        return int(tokens), int(self.costs[members].sum() - self.prompt_costs[repeats].sum())

    def executed_prompt_tokens(self, members: Sequence[int]) -> int:
        """Prompt tokens that a microbatch computes."""
        return int(self.prompt_tokens[members].sum() - self.prompt_tokens[self._repeats(members)].sum())

    def _repeats(self, members: Sequence[int]) -> list[int]:
        """The members whose prompt another one has brought along."""
        if self.group_of is None:
            return []
        seen: set[int] = set()
        return [i for i in members if self.group_of[i] in seen or seen.add(self.group_of[i])]


def plan_microbatches(
    lengths: Sequence[int],
    *,
    dp_size: int,
    max_tokens: int,
    count_multiple: int = 1,
    attention_ratio: float = 0.0,
    shared: SharedPrompts | None = None,
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
        shared: prompts that are packed once per group; None packs every sequence with its own.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(f"a sequence of {longest} tokens does not fit into a microbatch of {max_tokens}")
    work = _Workload.measure(lengths, attention_ratio, shared)
    units = [[i] for i in range(len(lengths))] if shared is None else _split_groups(shared, lengths, max_tokens)
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


def _split_groups(shared: SharedPrompts, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """The members of each group, in as few parts as the budget allows."""
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(shared.group_of):
        groups.setdefault(group, []).append(index)
    units = []
    for members in groups.values():
        prompt = shared.prompt_lengths[members[0]]
        responses = [lengths[i] - prompt for i in members]
        units += [[members[i] for i in part] for part in _fill_fewest_bins(responses, max_tokens - prompt) if part]
    return units


def _halve_heaviest(units: list[list[int]], rank_plan: list[list[int]], work: _Workload) -> list[list[int]] | None:
    """The units with the costliest one of a rank in two; None if none can be divided."""
    on_rank = {index for members in rank_plan for index in members}
    divisible = [u for u in units if len(u) > 1 and u[0] in on_rank]
    if not divisible:
        return None
    heaviest = max(divisible, key=lambda u: (work.sum(u)[1], -u[0]))
    halves = _fill_bins([int(work.costs[i]) for i in heaviest], 2)
    assert halves is not None, "bins without a limit hold anything"
    return [u for u in units if u is not heaviest] + [[heaviest[i] for i in half] for half in halves]


def _plan_units(
    units: list[list[int]], work: _Workload, dp_size: int, max_tokens: int, count_multiple: int
) -> MicrobatchPlan:
    """Bins of units, dealt to ranks, balanced, and spelled out in sequences."""
    sums = np.array([work.sum(unit) for unit in units], np.int64).reshape(-1, 2)
    tokens, costs = sums[:, 0], sums[:, 1]
    bins = _fill_fewest_bins(tokens.tolist(), max_tokens, dp_size, count_multiple)
    ranks = _deal(bins, costs, dp_size)
    balance_ranks(ranks, tokens, costs, max_tokens)
    group_of = work.group_of
    key = (lambda i: i) if group_of is None else (lambda i: (group_of[i], i))
    return [[sorted((i for unit in members for i in units[unit]), key=key) for members in rank] for rank in ranks]


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


def microbatch_sizes(plan: MicrobatchPlan, lengths: Sequence[int], shared: SharedPrompts | None = None) -> list[int]:
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
    shared: SharedPrompts | None = None,
    buckets: Buckets | None = None,
) -> dict[str, float]:
    """How good a plan is; arguments as for `plan_microbatches` and `build_train_batch`.

    Returns:
        packing/efficiency: real tokens over computed ones (with padding).
        packing/padded_efficiency: what it would be, had every sequence been padded to the longest.
        packing/budget_use: real tokens over microbatches times budget.
        packing/imbalance: cost of the heaviest DP rank over the mean.
        packing/prompt_repeats: with `shared`, executed over unique prompt tokens (1: each prompt once).
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
        executed = sum(work.executed_prompt_tokens(members) for members in microbatches)
        unique = sum(dict(zip(shared.group_of, shared.prompt_lengths, strict=True)).values())
        metrics["packing/prompt_repeats"] = executed / unique if unique else 1.0
    return metrics
