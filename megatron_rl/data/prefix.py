# SPDX-License-Identifier: Apache-2.0
"""Shared prompts: the responses of a group are packed behind one copy of their prompt (pure).

    plain    [prompt response_1] [prompt response_2] [prompt response_3]
    shared   [prompt response_1] [response_2] [response_3]

A bracket is a segment: attention is causal inside of it. A segment without a prompt of its own also sees the keys of
the shared one, its prefix, and its positions go on where the prompt ends. The mathematics is that of the plain
packing; the prompt's tokens are computed once per group and microbatch instead of once per response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


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
        index: [k] int64, rows of the microbatch, segment after segment.
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
        torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(device),
        torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device), max(lengths))
