# SPDX-License-Identifier: Apache-2.0
"""Positions of pieces of logical tensors, by which all weight formats are described.

A *logical tensor* is a tensor of the HF checkpoint. A `ShardBox` maps box `local_box` of a local parameter to box
`hf_box` of a logical tensor, of equal sizes. A format is a list of shard boxes per rank, its placement table.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]  # [start, stop) per dimension


@dataclass(frozen=True, slots=True)
class ShardBox:
    """Place of a piece of an HF tensor: `param[local_box]` holds `hf_name[hf_box]`."""

    param: str
    local_box: Box
    hf_name: str
    hf_box: Box


def full_box(shape: Iterable[int]) -> Box:
    """Return the box that covers a tensor of `shape`."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the sizes of a box."""
    return tuple(stop - start for start, stop in box)


def box_volume(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(stop - start for start, stop in box)


def box_slices(box: Box) -> tuple[slice, ...]:
    """Return the index of a box: `tensor[box_slices(box)]`."""
    return tuple(slice(start, stop) for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or `None` if empty."""
    box = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def find_overlap(boxes: Iterable[Box]) -> Box | None:
    """Return an intersection of two of these boxes, or `None` if all are disjoint."""
    ordered = sorted(box for box in boxes if box_volume(box))
    for i, box in enumerate(ordered):
        for j in range(i + 1, len(ordered)):
            if ordered[j][0][0] >= box[0][1]:  # sorted: neither this nor any later box can overlap
                break
            common = intersect(box, ordered[j])
            if common is not None:
                return common
    return None


def localize(part: Box, boxes: tuple[Box, Box]) -> Box:
    """Move `part`, inside box `boxes[1]` of one tensor, to the equally large box `boxes[0]` of another."""
    return tuple(
        (start - hf_start + local_start, stop - hf_start + local_start)
        for (start, stop), (local_start, _), (hf_start, _) in zip(part, *boxes, strict=True)
    )


def rows(start: int, stop: int, shape: tuple[int, ...]) -> Box:
    """Return the box of the rows [start, stop) of a tensor of `shape`."""
    return ((start, stop), *full_box(shape[1:]))


def columns(start: int, stop: int, shape: tuple[int, ...]) -> Box:
    """Return the box of the columns [start, stop) of a matrix of `shape`."""
    return ((0, shape[0]), (start, stop))


def fill_in_order(sizes: Mapping[str, int], limit: float) -> list[list[str]]:
    """Distribute names over batches in order, each of at most `limit`; a larger one is alone."""
    batches: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if batches[-1] and filled + size > limit:
            batches.append([])
            filled = 0
        batches[-1].append(name)
        filled += size
    return batches


def check_placements(
    placements: Iterable[ShardBox], params: Mapping[str, tuple[int, ...]], *, where: str, padded: Iterable[str] = ()
) -> None:
    """Check a rank's table against the parameters of its model.

    Args:
        params: name -> local shape.
        where: side, for errors ("megatron rank 3").

    Raises:
        ValueError: missing parameters, boxes that do not fit, or elements placed twice or not at all.
    """
    filled: dict[str, list[Box]] = {}
    for p in placements:
        shape = params.get(p.param)
        if shape is None:
            raise ValueError(f"{where}: the placement table names {p.param}, which the model does not have")
        inside = len(shape) == len(p.local_box) and all(
            0 <= start <= stop <= size for (start, stop), size in zip(p.local_box, shape, strict=True)
        )
        if not inside or box_shape(p.local_box) != box_shape(p.hf_box):
            raise ValueError(f"{where}: {p} does not fit parameter {p.param} of shape {tuple(shape)}")
        filled.setdefault(p.param, []).append(p.local_box)
    padded = set(padded)
    for name, shape in params.items():
        if name not in filled:
            raise ValueError(f"{where}: parameter {name} of shape {tuple(shape)} is not in the placement table")
        overlap = find_overlap(filled[name])
        if overlap is not None:
            raise ValueError(f"{where}: {list(overlap)} of {name} is placed twice")
        num_placed = sum(map(box_volume, filled[name]))
        if num_placed != math.prod(shape) and name not in padded:
            raise ValueError(f"{where}: {num_placed} of {math.prod(shape)} elements of {name} are placed")


def find_aliases(source: Iterable[ShardBox], destination: Iterable[ShardBox]) -> dict[str, str]:
    """Map each destination parameter to the source parameter with the same pieces at the same places (pure).

    Only layouts of one rank are compared; the caller must check shapes (vocabulary padding) and dtypes.
    """
    by_content = {content: name for name, content in _list_contents(source).items()}
    matches = {name: by_content.get(content) for name, content in _list_contents(destination).items()}
    return {name: match for name, match in matches.items() if match is not None}


def _list_contents(placements: Iterable[ShardBox]) -> dict[str, frozenset[tuple[Box, str, Box]]]:
    contents: dict[str, set[tuple[Box, str, Box]]] = defaultdict(set)
    for p in placements:
        contents[p.param].add((p.local_box, p.hf_name, p.hf_box))
    return {name: frozenset(content) for name, content in contents.items()}
