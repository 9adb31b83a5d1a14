# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes: what the sequences of a microbatch begin with in common is computed once (pure).

    plain     [prompt a b c] [prompt a d] [prompt e]
    prompts   [prompt a b c] [a d] [e]
    trees     [prompt a b c] [d] [e]

A bracket is a segment: attention is causal inside of it. A segment that does not begin its sequence also sees the keys
of what comes before, its prefix, wherever that is packed, and its positions continue where the prefix ends. The
mathematics is that of the plain packing; a shared token is computed once per microbatch instead of once per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from megatron_rl.types import Branch


@dataclass(frozen=True)
class SharedPrefixes:
    """What sequences have in common, in the order in which they are packed.

    Any two of them share at least the least that neighbors between them share. In the order of a walk through the
    prefix tree it is exactly that.

    Attributes:
        places: [n] int64, place of each sequence in that order.
        num_shared: [n] int64, by place: tokens that a sequence has in common with the one before it.
        shareable: [n] int64, by sequence: its tokens that others may share, of the prompt or all.
        name: of what is shared, in `packing/<name>_repeats`.
    """

    places: np.ndarray
    num_shared: np.ndarray
    shareable: np.ndarray
    name: str = "prompt"

    def measure(self, members: Sequence[int] | np.ndarray, firsts: Sequence[int] | np.ndarray = (0,)) -> np.ndarray:
        """Tokens that each of some sequences, in their order, has in common with the one before it; 0 for the first.

        Args:
            members: [k] sequences; several lists of them, each in its order, one after another.
            firsts: where each list begins in `members`.
        """
        places = self.places[np.asarray(members, np.int64)]
        if not len(places):
            return places
        firsts = np.asarray(firsts)
        firsts = firsts[firsts < len(places)]  # behind the end there are empty lists
        spans = np.repeat(places + 1, 2)  # places from the one before until its own
        spans[2::2] = spans[1:-1:2]
        spans[2 * firsts] = places[firsts]
        shared = np.minimum.reduceat(np.append(self.num_shared, 0), spans)[::2]
        shared[firsts] = 0
        return shared

    def part(self, start: int, stop: int) -> SharedPrefixes:
        """The same of the sequences [start, stop), counted from `start`."""
        order = np.argsort(self.places[start:stop])
        return SharedPrefixes(np.argsort(order), self.measure(start + order), self.shareable[start:stop], self.name)


def share_prompts(group_of: Sequence[int] | np.ndarray, prompt_lengths: Sequence[int] | np.ndarray) -> SharedPrefixes:
    """Sequences of one group share their prompt, and nothing else; they are packed group after group.

    Args:
        group_of: [n] a number per sequence; equal numbers share a prompt.
        prompt_lengths: [n] tokens of each sequence's prompt, the same within a group.
    """
    groups, prompts = np.asarray(group_of, np.int64), np.asarray(prompt_lengths, np.int64)
    order = np.argsort(groups, kind="stable")
    num_shared = np.where(is_repeated(groups[order]), prompts[order], 0)
    return SharedPrefixes(np.argsort(order), num_shared, prompts)


def is_repeated(values: np.ndarray) -> np.ndarray:
    """Whether each value is that of its predecessor, [n] bool."""
    return np.concatenate([np.zeros(min(len(values), 1), bool), values[1:] == values[:-1]])


def arrange_branches(branches: Sequence[Branch]) -> tuple[list[int], list[int]]:
    """A walk through the prefix tree of a rollout: those with most of the prompt first, then by their tokens.

    Returns:
        The place of each branch in it, and the tokens that it has in common with the branch at the place before.
    """
    if len(branches) == 1:
        return [0], [0]
    order = sorted(
        range(len(branches)),
        key=lambda i: (-branches[i].num_prompt_tokens, branches[i].tokens.astype(">u4").tobytes()),
    )
    places, num_shared = [0] * len(branches), [0] * len(branches)
    for place, index in enumerate(order):
        places[index] = place
        if place:
            num_shared[index] = _count_common(branches[order[place - 1]], branches[index])
    return places, num_shared


def _count_common(first: Branch, second: Branch) -> int:
    """Tokens that two branches begin with in common, and which the engine sent to the same experts, where it tells."""
    length = min(len(first.tokens), len(second.tokens))
    is_same = first.tokens[:length] == second.tokens[:length]
    if first.routes is not None and second.routes is not None:
        is_same = is_same & (first.routes[:length] == second.routes[:length]).all((1, 2))
    elif first.routes is not second.routes:
        return 0
    return length if is_same.all() else int(is_same.argmin())


@dataclass(frozen=True)
class SegmentKeys:
    """The keys that the queries of each segment see: first its prefix, then its own, causally.

    Attributes:
        index: [k] int64, rows of the microbatch, segment after segment; -1: padding.
        cu_seqlens: [num_segments + 1] int32, boundaries in `index`.
        max_seqlen: most keys of a segment.
    """

    index: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int


def build_segment_keys(paths: Sequence[np.ndarray], lengths: Sequence[int], device: torch.device) -> SegmentKeys | None:
    """List the keys of every segment of a microbatch; None where no segment has a prefix.

    Args:
        paths: int64, rows of each segment's prefix and then its own.
        lengths: how many of them are its own.
        device: where the tensors live.
    """
    num_keys = [len(path) for path in paths]
    if num_keys == [*lengths]:
        return None
    return SegmentKeys(
        move_to_device(np.concatenate(paths), device),
        move_to_device(np.cumsum([0, *num_keys], dtype=np.int32), device),
        max(num_keys),
    )


def move_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of the same values; the copy to a GPU is from pinned memory, and nobody waits for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def pad_segment_keys(keys: SegmentKeys, num_segments: int, num_keys: int, max_prefixed: int) -> SegmentKeys:
    """The same keys in tensors of given sizes: the last segment, which has no query, owns the padding.

    Args:
        keys: of fewer than `num_segments` segments.
        num_segments, num_keys: wanted.
        max_prefixed: no segment with its prefix has more keys.
    """
    count, room = len(keys.index), num_segments + 1 - len(keys.cu_seqlens)
    assert room > 0 and num_keys >= count and keys.max_seqlen <= max_prefixed
    cu_seqlens = F.pad(keys.cu_seqlens, (0, room), value=count)
    cu_seqlens[-1] = num_keys
    return SegmentKeys(F.pad(keys.index, (0, num_keys - count), value=-1), cu_seqlens, max_prefixed)
