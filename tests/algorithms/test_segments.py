# SPDX-License-Identifier: Apache-2.0
"""Sums over packed sequences against a loop."""

from __future__ import annotations

import torch

from megatron_rl.algorithms.losses import number_segments, sum_per_segment

IDS = torch.tensor([4, 4, 0, -1, -1, 7, 7, 7])


def test_segments_are_runs_of_equal_ids() -> None:
    assert number_segments(IDS).tolist() == [0, 0, 1, 2, 2, 3, 3, 3]
    assert number_segments(IDS[:1]).tolist() == [0] and number_segments(IDS[:0]).tolist() == []


def test_every_token_gets_the_sum_of_its_segment() -> None:
    found = sum_per_segment(torch.arange(8.0), number_segments(IDS))
    assert found.tolist() == [1, 1, 2, 7, 7, 18, 18, 18] and found.dtype == torch.float64
    assert sum_per_segment(IDS > 0, number_segments(IDS)).tolist() == [2, 2, 0, 0, 0, 3, 3, 3]


def test_small_numbers_survive_large_ones() -> None:
    """In float32 1e8 + 1 - 1e8 is 0 or 1, by the order of the additions."""
    for order in ([1e8, 1.0, -1e8], [1e8, -1e8, 1.0]):
        assert sum_per_segment(torch.tensor(order), torch.zeros(3).long()).tolist() == [1.0] * 3
