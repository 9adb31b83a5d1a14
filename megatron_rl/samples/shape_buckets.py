# SPDX-License-Identifier: Apache-2.0
"""Buckets of microbatch shapes, so that training steps of fixed shape see only a few shapes (pure).

In `step_mode` static and graph every microbatch is padded to the smallest bucket that holds it. With the default,
sixteenths of the token budget, microbatches more than half full have at most 1/9 padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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

    def find_size(self, num_tokens: int) -> int:
        """Return the smallest bucket size that holds `num_tokens`."""
        return next(size for size in self.sizes if size >= num_tokens)

    def find_slots(self, num_segments: int) -> int:
        """Return the padded number of segments."""
        return _double_until(self.max_num_seqs, num_segments)

    def find_num_keys(self, num_keys: int, size: int) -> int:
        """Return the padded number of keys with shared prompts."""
        return _double_until(size, num_keys)


def _double_until(room: int, needed: int) -> int:
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
