# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes: common beginnings of the sequences of a microbatch are computed once (pure).

    plain     [prompt a b c] [prompt a d] [prompt e]
    prompts   [prompt a b c] [a d] [e]
    trees     [prompt a b c] [d] [e]

A bracket is a segment, with causal attention inside. A segment that continues a prefix also attends to the keys of that
prefix, wherever it is packed, and continues its positions. The result equals that of plain packing.

Units (sets of sequences that stay together) fill bins, longest first. The cost of a sequence of s tokens is
s + attention_ratio * s^2: all work linear in the tokens, plus causal attention.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import neg
from typing import NamedTuple

import numpy as np
import torch


@dataclass(frozen=True)
class SharedPrefixes:
    """Common prefixes of sequences in packing order (the order in which a batch contains them).

    Places i < j share at least min(num_shared[i + 1 : j + 1]) tokens; exactly that if the order walks a prefix tree.

    Attributes:
        places: [n] int64, place of each sequence in the packing order.
        num_shared: [n] int64, by place: tokens shared with the previous sequence.
        shareable: [n] int64, by sequence: its tokens that can be shared (the prompt, or all).
        name: for the metric `packing/<name>_repeats`.
    """

    places: np.ndarray
    num_shared: np.ndarray
    shareable: np.ndarray
    name: str = "prompt"

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


@dataclass(frozen=True)
class SegmentKeys:
    """The keys that the queries of each segment attend to: the whole prefix, then the segment itself, causally.

    Attributes:
        index: [k] int64, rows of the microbatch by segment; -1 on padding.
        cu_seqlens: [num_segments + 1] int32, boundaries in `index`.
        max_seqlen: most keys of a segment.
    """

    index: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int


def build_segment_keys(paths: Sequence[np.ndarray], lengths: Sequence[int], device: torch.device) -> SegmentKeys | None:
    """List the keys of every segment of a microbatch; `None` if no segment has a prefix.

    Args:
        paths: int64, per segment the rows of its prefix and then its own.
        lengths: own rows of each segment.
    """
    num_keys = [len(path) for path in paths]
    if num_keys == [*lengths]:
        return None
    cu_seqlens = move_to_device(np.cumsum([0, *num_keys], dtype=np.int32), device)
    return SegmentKeys(move_to_device(np.concatenate(paths), device), cu_seqlens, max(num_keys))


def move_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a tensor on the device; copies to a GPU are asynchronous."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


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
