# SPDX-License-Identifier: Apache-2.0
"""Sums over the sequences of a packed [t] tensor, with shapes that depend on t only, for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


def number_segments(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Number the runs of equal ids consecutively from 0, [t] int64; padding is a run of its own."""
    return sequence_ids.diff(prepend=sequence_ids[:1]).ne(0).cumsum(0)


def sum_per_segment(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Give every token the sum over its segment, [t] float64: float32 would show the GPU's order of additions."""
    sums = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    return sums.index_add(0, segments, values.double())[segments]


@dataclass(frozen=True)
class Responses:
    """Assignment of the tokens of a packed [t] tensor to responses.

    Attributes:
        is_first: [t] bool, one token of each response, on one rank.
        add_up: gives every token the sum over its response, [t] -> [t] float64.
    """

    is_first: torch.Tensor
    add_up: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of_sequences(cls, sequence_ids: torch.Tensor) -> Responses:
        """Build from sequence ids [t], with one response per sequence."""
        segments = number_segments(sequence_ids)
        return cls(mark_first(sequence_ids), lambda values: sum_per_segment(values, segments))


def mark_first(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Mark the first token of each run of equal ids, [t] bool."""
    return sequence_ids.diff(prepend=sequence_ids[:1] - 1).ne(0)
