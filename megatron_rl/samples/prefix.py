# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes: common beginnings of the sequences of a microbatch are computed once (pure).

    plain     [prompt a b c] [prompt a d] [prompt e]
    prompts   [prompt a b c] [a d] [e]
    trees     [prompt a b c] [d] [e]

A bracket is a segment, with causal attention inside. A segment that continues a prefix also attends to the keys of that
prefix, wherever it is packed, and continues its positions. The result equals that of plain packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
