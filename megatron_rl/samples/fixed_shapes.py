# SPDX-License-Identifier: Apache-2.0
"""Buckets: the few shapes of microbatches with `step_mode` static or graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_STEPS = 16


@dataclass(frozen=True)
class Buckets:
    """The allowed shapes of a microbatch."""

    sizes: tuple[int, ...]  # numbers of tokens, ascending
    max_num_seqs: int  # padded number of segments, doubled if exceeded


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
