# SPDX-License-Identifier: Apache-2.0
"""Sums over the sequences of a packed [t] tensor, with shapes that depend on t only.

Nothing here looks at a value on the host, so that it may run inside a CUDA graph: the number of sequences
is never known, and buffers over sequences have the length t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


def number_segments(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Consecutive numbers 0, 1, ... of the runs of equal ids, [t] int64; padding is a run of its own."""
    return sequence_ids.diff(prepend=sequence_ids[:1]).ne(0).cumsum(0)


def sum_per_segment(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Give every token the sum over its segment, [t] float64.

    In float64, so that the order of the additions (free on a GPU) is lost when the result is rounded to float32.

    Args:
        values: [t].
        segments: [t] int64 from `number_segments`.
    """
    sums = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    return sums.index_add(0, segments, values.double())[segments]


@dataclass(frozen=True)
class Responses:
    """The responses that the tokens of a packed [t] tensor belong to.

    Attributes:
        is_first: [t] bool, one token of each response, on one rank.
        add_up: gives every token the sum over its response, [t] -> [t] float64.
    """

    is_first: torch.Tensor
    add_up: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of_sequences(cls, sequence_ids: torch.Tensor) -> Responses:
        """Every sequence is one, [t] int64; sequences are contiguous and whole."""
        segments = number_segments(sequence_ids)
        return cls(mark_first(sequence_ids), lambda values: sum_per_segment(values, segments))


def mark_first(sequence_ids: torch.Tensor) -> torch.Tensor:
    """The first token of each run of equal ids, [t] bool."""
    return sequence_ids.diff(prepend=sequence_ids[:1] - 1).ne(0)
