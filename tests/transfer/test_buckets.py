# SPDX-License-Identifier: Apache-2.0
"""Buckets: pieces cover the transfers exactly, no bucket is too large, both sides cut at the same places."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.transfer.planner import TransferOp
from megatron_rl.transfer.transports import cut_into_buckets, split_op
from megatron_rl.weights.shard_box import box_shape
from shards import count_writes


@st.composite
def transfers(draw: st.DrawFn) -> TransferOp:
    """A piece of one to three dimensions that lies at different places on both sides."""
    size = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    src, dst = (
        tuple((at, at + n) for n, at in zip(size, draw(st.tuples(*[st.integers(0, 5)] * len(size))))) for _ in range(2)
    )
    return TransferOp(f"t{draw(st.integers(0, 3))}", 0, "source", src, 1, "destination", dst)


def number_box(size: tuple[int, ...]) -> torch.Tensor:
    """The elements of a box, numbered in memory order."""
    return torch.arange(math.prod(size)).view(size)


@given(transfers(), st.integers(1, 60))
def test_pieces_in_order_are_the_whole(op: TransferOp, limit: int) -> None:
    """The concatenated pieces have the order of the whole transfer in memory, on both sides."""
    pieces = list(split_op(op, limit))
    numbers = number_box(box_shape(op.dst_box))
    for side in ("src_box", "dst_box"):
        joined = []
        for piece in pieces:
            offsets = [
                slice(start - first, stop - first)
                for (start, stop), (first, _) in zip(getattr(piece, side), getattr(op, side))
            ]
            joined.append(numbers[tuple(offsets)].flatten())
        assert torch.equal(torch.cat(joined), numbers.flatten())
    assert all(0 < piece.num_elements <= limit for piece in pieces)
    assert all(replace(piece, src_box=op.src_box, dst_box=op.dst_box) == op for piece in pieces)
    if op.num_elements <= limit:
        assert pieces == [op]


@given(st.lists(transfers(), max_size=8), st.integers(1, 80))
def test_buckets_hold_everything_in_order_and_within_the_bound(ops: list[TransferOp], limit: int) -> None:
    buckets = cut_into_buckets(iter(ops), limit)
    assert [piece for bucket in buckets for piece in bucket] == [piece for op in ops for piece in split_op(op, limit)]
    sizes = [sum(piece.num_elements for piece in bucket) for bucket in buckets]
    assert all(0 < size <= limit for size in sizes)
    for size, bucket, following in zip(sizes, buckets, buckets[1:]):
        is_alone = any(8 * piece.num_elements >= limit for piece in (bucket[0], following[0]))
        assert is_alone or size + following[0].num_elements > limit  # no bucket ends early
        assert len(bucket) == 1 or all(8 * piece.num_elements < limit for piece in bucket)


@given(st.lists(transfers(), max_size=8), st.integers(1, 80))
def test_both_sides_cut_at_the_same_places(ops: list[TransferOp], limit: int) -> None:
    """The cuts depend on sizes only: a side that sees other boxes of the same sizes cuts equally."""
    moved = [replace(op, src_box=tuple((start + 9, stop + 9) for start, stop in op.src_box)) for op in ops]
    sizes = [[piece.num_elements for piece in bucket] for bucket in cut_into_buckets(ops, limit)]
    assert sizes == [[piece.num_elements for piece in bucket] for bucket in cut_into_buckets(moved, limit)]


def test_a_piece_is_cut_along_its_rows_first() -> None:
    op = TransferOp("t", 0, "a", ((2, 6), (0, 3)), 1, "b", ((0, 4), (5, 8)))
    assert [piece.dst_box for piece in split_op(op, 7)] == [((0, 2), (5, 8)), ((2, 4), (5, 8))]
    assert [piece.src_box for piece in split_op(op, 2)][:3] == [((2, 3), (0, 2)), ((2, 3), (2, 3)), ((3, 4), (0, 2))]


@pytest.mark.parametrize("limit", [1, 5, 1000])
def test_nothing_is_written_twice(limit: int) -> None:
    ops = [TransferOp("t", 0, "a", ((i, i + 1), (0, 9)), 1, "b", ((i, i + 1), (0, 9))) for i in range(4)]
    pieces = [piece for bucket in cut_into_buckets(ops, limit) for piece in bucket]
    assert torch.equal(count_writes((4, 9), [p.dst_box for p in pieces]), torch.ones(4, 9, dtype=torch.int32))
    assert cut_into_buckets([], limit) == []
