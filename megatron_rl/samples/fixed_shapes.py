# SPDX-License-Identifier: Apache-2.0
"""Buckets: the few shapes of microbatches with `step_mode` static or graph, and padding to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F

from megatron_rl.samples.prefix import SegmentKeys

_STEPS = 16


@dataclass(frozen=True)
class Buckets:
    """The allowed shapes of a microbatch.

    Attributes:
        sizes: numbers of tokens, ascending.
        max_num_seqs: padded number of segments, doubled if exceeded.
    """

    sizes: tuple[int, ...]
    max_num_seqs: int

    def pad_segments(
        self, bounds: np.ndarray, keys: SegmentKeys | None, longest: int
    ) -> tuple[np.ndarray, SegmentKeys | None]:
        """Pad the bounds of a full microbatch's segments, and their keys, to a fixed number.

        Args:
            longest: the result's largest number of keys of a segment.
        """
        # One extra segment, so that there always is an empty one: it owns the padding of the keys.
        slots, stop = double_until(self.max_num_seqs, len(bounds)), int(bounds[-1])
        bounds = np.pad(bounds, (0, slots + 1 - len(bounds)), mode="edge")
        if keys is not None:
            keys = pad_segment_keys(keys, slots, double_until(stop, len(keys.index)), longest)
        return bounds, keys


def double_until(room: int, needed: int) -> int:
    """Double `room` until it holds `needed`."""
    while room < needed:
        room *= 2
    return room


def build_buckets(max_tokens: int, sizes: Sequence[int], multiple: int, max_num_seqs: int) -> Buckets:
    """Build the buckets of one role.

    Args:
        sizes: the largest is at least `max_tokens`; sixteenths of `max_tokens` if empty.
        multiple: every size is rounded up to a multiple of this.
    """
    wanted = sizes or [-(-max_tokens * n // _STEPS) for n in range(1, _STEPS + 1)]
    rounded = {max(-(-size // multiple), 1) * multiple for size in wanted}
    assert max(rounded) >= max_tokens, "the largest bucket holds the token budget"
    return Buckets(tuple(sorted(rounded)), max_num_seqs)


def pad_segment_keys(keys: SegmentKeys, num_segments: int, num_keys: int, max_prefixed: int) -> SegmentKeys:
    """Pad to `num_segments` segments and `num_keys` keys; the last segment, without queries, owns the padding.

    Args:
        max_prefixed: the result's `max_seqlen`.
    """
    count, room = len(keys.index), num_segments + 1 - len(keys.cu_seqlens)
    assert room > 0 and num_keys >= count and keys.max_seqlen <= max_prefixed
    cu_seqlens = F.pad(keys.cu_seqlens, (0, room), value=count)
    cu_seqlens[-1] = num_keys
    return SegmentKeys(F.pad(keys.index, (0, num_keys - count), value=-1), cu_seqlens, max_prefixed)


def padding_metrics(shapes: Iterable[tuple[int, int]]) -> dict[str, float]:
    """Compute the share of padding in total and per bucket from (real tokens, bucket size) of every microbatch."""
    by_bucket: dict[int, list[int]] = {}
    for real, size in shapes:
        by_bucket.setdefault(size, []).append(real)
    computed = sum(size * len(found) for size, found in by_bucket.items())
    metrics = {"packing/padding_share": 1.0 - sum(map(sum, by_bucket.values())) / computed}
    for size, found in sorted(by_bucket.items()):
        metrics[f"packing/padding_share_{size}"] = 1.0 - sum(found) / (size * len(found))
    return metrics
