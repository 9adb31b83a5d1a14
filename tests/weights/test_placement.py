# SPDX-License-Identifier: Apache-2.0
"""Boxes against numpy's own indexing, and invalid tables of a model."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.weights.shard_box import (
    Box,
    ShardBox,
    box_shape,
    box_slices,
    box_volume,
    check_placements,
    columns,
    find_overlap,
    full_box,
    intersect,
    localize,
    rows,
)

SIZE = (5, 4, 6)


@st.composite
def boxes(draw: st.DrawFn, num_dims: int, min_size: int = 0) -> Box:
    """Draw a box inside the first `num_dims` dimensions of SIZE; may be empty if min_size is 0."""
    box = []
    for size in SIZE[:num_dims]:
        start = draw(st.integers(0, size - min_size))
        box.append((start, draw(st.integers(start + min_size, size))))
    return tuple(box)


def mark(box: Box) -> np.ndarray:
    """True inside of the box."""
    inside = np.zeros(SIZE[: len(box)], dtype=bool)
    inside[box_slices(box)] = True
    return inside


two_boxes = st.integers(1, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n)))


@given(two_boxes)
def test_intersect_is_the_common_elements(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = intersect(a, b)
    expected = mark(a) & mark(b)
    assert intersect(b, a) == common
    if common is None:
        assert not expected.any()
    else:
        assert np.array_equal(mark(common), expected)
        assert box_volume(common) == expected.sum() > 0


@given(st.integers(1, 3).flatmap(lambda n: st.lists(boxes(n), max_size=6)))
def test_find_overlap_finds_a_common_part_if_there_is_one(several: list[Box]) -> None:
    counts = sum((mark(box).astype(int) for box in several), start=np.zeros(1, dtype=int))
    overlap = find_overlap(several)
    if overlap is None:
        assert counts.max() <= 1
    else:
        assert box_volume(overlap) > 0 and counts[box_slices(overlap)].min() >= 2


@given(st.integers(1, 3).flatmap(lambda n: boxes(n)))
def test_shape_and_volume_are_those_of_the_slice(box: Box) -> None:
    piece = mark(box)[box_slices(box)]
    assert box_shape(box) == piece.shape
    assert box_volume(box) == piece.size


@given(
    st.integers(1, 3).flatmap(lambda n: st.tuples(boxes(n, 1), boxes(n, 1))),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_localize_finds_the_same_elements_in_the_parameter(pair: tuple[Box, Box], offsets: list[int]) -> None:
    hf_box, other = pair
    part = intersect(hf_box, other)
    if part is None:
        return
    full = np.arange(math.prod(SIZE[: len(hf_box)])).reshape(SIZE[: len(hf_box)])
    local_box = tuple((at, at + stop - start) for (start, stop), at in zip(hf_box, offsets))
    param = np.full([stop + 1 for _, stop in local_box], -1)
    param[box_slices(local_box)] = full[box_slices(hf_box)]
    local = localize(part, (local_box, hf_box))
    assert np.array_equal(param[box_slices(local)], full[box_slices(part)])


def test_rows_and_columns() -> None:
    assert rows(1, 3, (5, 4)) == ((1, 3), (0, 4))
    assert rows(1, 3, (5,)) == ((1, 3),)
    assert columns(1, 3, (5, 4)) == ((0, 5), (1, 3))
    assert full_box((5, 4)) == ((0, 5), (0, 4)) and box_volume(full_box(())) == 1
    with pytest.raises(ValueError):
        intersect(((0, 1),), ((0, 1), (0, 1)))


def place(param: str, start: int, stop: int, hf_start: int = 0, hf_stop: int | None = None) -> ShardBox:
    """Rows of a matrix with two columns."""
    hf_stop = hf_start + stop - start if hf_stop is None else hf_stop
    return ShardBox(param, rows(start, stop, (0, 2)), f"hf.{param}", rows(hf_start, hf_stop, (0, 2)))


def test_a_table_that_fits_is_accepted() -> None:
    table = [place("a", 0, 2), place("a", 2, 4, 7), place("b", 0, 3), place("c", 0, 0)]
    check_placements(table, {"a": (4, 2), "b": (5, 2), "c": (2, 2)}, where="here", padded=iter(["b", "c"]))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([place("a", 0, 4), place("z", 0, 1)], "rank 3: the placement table names z, which the model does not"),
        ([place("z", 0, 4)], "rank 3: the placement table names z"),
        ([], r"rank 3: parameter a of shape \(4, 2\) is not in the placement table"),
        ([place("a", 0, 3)], "rank 3: 6 of 8 elements of a are placed"),
        ([place("a", 0, 5)], r"rank 3: .* does not fit parameter a of shape \(4, 2\)"),
        ([place("a", -1, 3)], r"rank 3: .* does not fit parameter a"),
        ([place("a", 0, 4, 0, 3)], r"rank 3: .* does not fit parameter a"),
        ([ShardBox("a", ((0, 8),), "t", ((0, 8),))], r"rank 3: .* does not fit parameter a"),
        ([place("a", 0, 4), place("a", 2, 4)], r"rank 3: \[\(2, 4\), \(0, 2\)\] of a is placed twice"),
        ([place("a", 0, 3), place("a", 2, 3)], "rank 3: .* of a is placed twice"),
    ],
    ids=[
        "unknown too",
        "unknown",
        "missing",
        "incomplete",
        "too large",
        "negative",
        "sizes",
        "dims",
        "twice",
        "twice and incomplete",
    ],
)
def test_a_table_that_does_not_fit_is_refused(table: list[ShardBox], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_placements(table, {"a": (4, 2)}, where="rank 3")


def test_padding_does_not_excuse_overlaps() -> None:
    with pytest.raises(ValueError, match="rank 0: .* of a is placed twice"):
        check_placements([place("a", 0, 3), place("a", 1, 2)], {"a": (8, 2)}, where="rank 0", padded=["a"])
