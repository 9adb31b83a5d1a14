# SPDX-License-Identifier: Apache-2.0
"""Cut the transfers of a plan into buckets of bounded size (pure).

The stream of pieces from one rank to another is cut at the same places by both of them, because both
see the same operations in the same order. Round k of a reshard exchanges bucket k of every pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_rl.resharding.planner import TransferOp
from megatron_rl.weights.placement import Box, box_shape

Bucket = list[TransferOp]


def split_op(op: TransferOp, max_elements: int) -> Iterator[TransferOp]:
    """Cut one transfer along its outermost dimensions into pieces of at most `max_elements`."""
    if op.num_elements <= max_elements:
        yield op
        return
    shape = box_shape(op.dst_box)
    dim = next(i for i, size in enumerate(shape) if size > 1)
    per_index = op.num_elements // shape[dim]
    step = max(1, max_elements // per_index)
    for first in range(0, shape[dim], step):
        last = min(first + step, shape[dim])
        part = replace(op, src_box=_cut(op.src_box, dim, first, last), dst_box=_cut(op.dst_box, dim, first, last))
        yield from split_op(part, max_elements)


def _cut(box: Box, dim: int, first: int, last: int) -> Box:
    start = box[dim][0]
    return (*box[:dim], (start + first, start + last), *box[dim + 1:])


def cut_into_buckets(ops: Iterable[TransferOp], max_elements: int) -> list[Bucket]:
    """Fill buckets in order; none holds more than `max_elements` (at least 1)."""
    buckets: list[Bucket] = []
    filled = max_elements
    for op in ops:
        for part in split_op(op, max_elements):
            if filled + part.num_elements > max_elements:
                buckets.append([])
                filled = 0
            buckets[-1].append(part)
            filled += part.num_elements
    return buckets


def bucket_elements(bucket: Sequence[TransferOp]) -> int:
    """Number of elements in a bucket."""
    return sum(op.num_elements for op in bucket)
