# SPDX-License-Identifier: Apache-2.0
"""Copies of many small pieces as few copies of blocks.

The matrices of a layer's experts lie one behind the other on both sides of a move, and so do the rows or columns of
them that a rank gets: one copy with a dimension more does them all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

Copy = tuple[torch.Tensor, torch.Tensor]  # target, origin


def join_copies(copies: Iterable[Copy]) -> list[Copy]:
    """The same copies, those together that are alike and equally far apart on both sides.

    Args:
        copies: pieces of equal shape each; no two targets overlap.
    """
    ordered = sorted(copies, key=lambda copy: (_storage(copy[0]), _storage(copy[1]), copy[0].data_ptr()))
    runs: list[list[Copy]] = []
    for copy in ordered:
        if runs and _continues(runs[-1], copy):
            runs[-1].append(copy)
        else:
            runs.append([copy])
    return [run[0] if len(run) == 1 else (_join([t for t, _ in run]), _join([o for _, o in run])) for run in runs]


def _continues(run: list[Copy], copy: Copy) -> bool:
    """Whether a copy is as far behind the last one of a run as that one is behind the one before it."""
    for side in (0, 1):
        last, piece = run[-1][side], copy[side]
        if _storage(last) != _storage(piece) or _layout(last) != _layout(piece):
            return False
        step = piece.storage_offset() - last.storage_offset()
        if step <= 0 or len(run) > 1 and step != last.storage_offset() - run[-2][side].storage_offset():
            return False
    return True


def _join(pieces: list[torch.Tensor]) -> torch.Tensor:
    first, step = pieces[0], pieces[1].storage_offset() - pieces[0].storage_offset()
    return first.as_strided((len(pieces), *first.shape), (step, *first.stride()))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()
