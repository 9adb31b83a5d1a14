# SPDX-License-Identifier: Apache-2.0
"""A short ladder of microbatch shapes, so that a training step of fixed shapes sees few of them (pure).

In `step_mode` static and graph every microbatch is padded to the smallest bucket that holds it. The default ladder has
the sixteenths of the token budget: packing fills the microbatches of a minibatch alike, so most are more than half
full, and then at most 1/9 of a bucket is padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_STEPS = 16


@dataclass(frozen=True)
class Buckets:
    """The shapes that a microbatch may have.

    Attributes:
        sizes: numbers of tokens, ascending.
        max_num_seqs: segments that a microbatch has room for; twice, four times ... that for one that has more.
    """

    sizes: tuple[int, ...]
    max_num_seqs: int

    def find_size(self, num_tokens: int) -> int:
        """The smallest size that holds so many tokens."""
        return next(size for size in self.sizes if size >= num_tokens)

    def find_slots(self, num_segments: int) -> int:
        """Room for so many segments."""
        return _double_until(self.max_num_seqs, num_segments)

    def find_num_keys(self, num_keys: int, size: int) -> int:
        """Room for the keys of `size` tokens with shared prompts: once, twice, four times ... `size`."""
        return _double_until(size, num_keys)


def _double_until(room: int, needed: int) -> int:
    while room < needed:
        room *= 2
    return room


def build_buckets(max_tokens: int, sizes: Sequence[int], multiple: int, max_num_seqs: int) -> Buckets:
    """The ladder of one role.

    Args:
        max_tokens: token budget of a microbatch.
        sizes: wanted lengths, the largest at least the budget; empty: the sixteenths of it.
        multiple: every length becomes a multiple of this (upwards).
        max_num_seqs: see `Buckets`.
    """
    wanted = sizes or [-(-max_tokens * n // _STEPS) for n in range(1, _STEPS + 1)]
    rounded = {max(-(-size // multiple), 1) * multiple for size in wanted}
    assert max(rounded) >= max_tokens, "the largest bucket holds the token budget"
    return Buckets(tuple(sorted(rounded)), max_num_seqs)


def padding_metrics(shapes: Iterable[tuple[int, int]]) -> dict[str, float]:
    """Share of the computed tokens that are padding.

    Args:
        shapes: (real tokens, size of its bucket) of every microbatch.

    Returns:
        packing/padding_share, and packing/padding_share_<bucket> for each bucket that is in use.
    """
    by_bucket: dict[int, list[int]] = {}
    for real, size in shapes:
        by_bucket.setdefault(size, []).append(real)
    computed = sum(size * len(found) for size, found in by_bucket.items())
    metrics = {"packing/padding_share": 1.0 - sum(map(sum, by_bucket.values())) / computed}
    for size, found in sorted(by_bucket.items()):
        metrics[f"packing/padding_share_{size}"] = 1.0 - sum(found) / (size * len(found))
    return metrics
