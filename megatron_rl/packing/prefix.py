# SPDX-License-Identifier: Apache-2.0
"""Shared prompts: the responses of a group are packed behind one copy of their prompt (pure).

    plain    [prompt response_1] [prompt response_2] [prompt response_3]
    shared   [prompt response_1] [response_2] [response_3]

A bracket is a segment: attention is causal inside of it. A segment without a prompt of its own also sees the keys of
the shared one, its prefix, and its positions continue where the prompt ends. The mathematics is that of the plain
packing; the prompt's tokens are computed once per group and microbatch instead of once per response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class SharedPrompts:
    """Which sequences have their prompt in common; both by index of the sequence.

    Attributes:
        group_of: a number per sequence; equal numbers share a prompt.
        prompt_lengths: tokens of each sequence's prompt, the same within a group.
    """

    group_of: Sequence[int]
    prompt_lengths: Sequence[int]


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


def build_segment_keys(
    bounds: np.ndarray, prefixes: Sequence[tuple[int, int]], device: torch.device
) -> SegmentKeys | None:
    """List the keys of every segment of a microbatch; None where no segment has a prefix.

    Args:
        bounds: [num_segments + 1], where segments begin and end.
        prefixes: [start, stop) of each segment's prefix; start = stop for none.
        device: where the tensors live.
    """
    if all(start == stop for start, stop in prefixes):
        return None
    rows = [
        np.concatenate([np.arange(*prefix), np.arange(start, stop)])
        for start, stop, prefix in zip(bounds[:-1], bounds[1:], prefixes, strict=True)
    ]
    lengths = [len(r) for r in rows]
    return SegmentKeys(
        move_to_device(np.concatenate(rows).astype(np.int64), device),
        move_to_device(np.cumsum([0, *lengths], dtype=np.int32), device),
        max(lengths),
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
