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
* the heaviest rank costs at most `CLOSE` times that of the plain plan without sharing;
* the result depends on the lengths only (costs are integers): every rank computes the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, pairwise

import numpy as np

from megatron_rl.samples.prefix import (
    CLOSE,
    Joined,
    PackingWork,
    SharedPrefixes,
    Units,
    compute_costs,
    deal,
    fill_fewest_bins,
    find_bounds,
    round_up,
)

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
    singles = Units.measure(work, np.arange(len(lengths)), bounds)
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
        from megatron_rl.samples.balancing import divide_groups

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
