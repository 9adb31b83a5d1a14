# SPDX-License-Identifier: Apache-2.0
"""Attention in tiles: the bits of a row whatever is computed beside it, and the values of ordinary attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.models.attention import attend, build_segments
from megatron_rl.models.attention_kernels import attend_in_tiles, build_tiles
from megatron_rl.models.segments import Segments

LENGTHS = [1, 5, 31, 32, 33, 64, 100, 257, 600]
SHAPES = [(4, 2, 32), (8, 8, 64), (3, 1, 8)]  # heads of queries, of keys and values, and their dimension


def find_ends(lengths: list[int]) -> torch.Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def draw(heads: int, kv_heads: int, dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(sum(LENGTHS), n, dim, generator=generator) for n in (heads, kv_heads, kv_heads)]


def cut(ends_q: torch.Tensor, ends_k: torch.Tensor) -> Segments:
    return build_tiles(Segments("tiled", ends_q, ends_k, 0, 0))


@pytest.mark.parametrize("shape", SHAPES)
def test_any_tail_of_a_sequence_has_the_bits_of_the_whole(shape: tuple[int, int, int]) -> None:
    """Decoding one token, or any number of them behind their cache, alone or together with other sequences."""
    (query, key, value), ends = draw(*shape), find_ends(LENGTHS)
    whole = attend_in_tiles(query, key, value, cut(ends, ends), 0.2)
    last_rows = []
    for start, length in zip(ends.tolist(), LENGTHS, strict=False):
        for stop in {1, length // 2 or 1, min(length, 32), min(length, 33), length}:
            for tail in {1, min(stop, 7), min(stop, 40)}:
                rows = slice(start + stop - tail, start + stop)
                tiles = cut(find_ends([tail]), find_ends([stop]))
                keys, values = key[start : start + stop], value[start : start + stop]
                assert torch.equal(attend_in_tiles(query[rows], keys, values, tiles, 0.2), whole[rows])
        last_rows.append(start + length - 1)
    tiles = cut(find_ends([1] * len(LENGTHS)), ends)
    assert torch.equal(attend_in_tiles(query[last_rows], key, value, tiles, 0.2), whole[last_rows])


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_sdpa(shape: tuple[int, int, int]) -> None:
    inputs, ends = [x.requires_grad_() for x in draw(*shape)], find_ends(LENGTHS)
    found, expected = [], []
    for backend, into in (("tiled", found), ("sdpa", expected)):
        segments = build_segments(ends, max(LENGTHS), None, torch.float32, backend)
        output = attend(*inputs, segments, 0.2)
        into += [output, *torch.autograd.grad(output.square().sum(), inputs)]
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
