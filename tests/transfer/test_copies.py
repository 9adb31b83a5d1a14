# SPDX-License-Identifier: Apache-2.0
"""Copies of experts' matrices become a few equivalent copies of blocks.

Not covered: the gain, which tools/benchmarks/bench_reshard.py measures.
"""

from __future__ import annotations

import random

import pytest
import torch

from megatron_rl.transfer.executor import Copy, join_copies

EXPERTS, FFN, HIDDEN = 5, 6, 4


def make_sides() -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and ups of experts in two storages, which have other numbers in front."""
    size = EXPERTS * 2 * FFN * HIDDEN
    origin = torch.arange(size + 7, dtype=torch.float32)[7:]
    return torch.zeros(size + 3)[3:].view(EXPERTS, 2 * FFN, HIDDEN), origin.view(EXPERTS, 2 * FFN, HIDDEN)


def list_copies(target: torch.Tensor, origin: torch.Tensor, pieces: str) -> list[Copy]:
    """As a plan has them: of every expert a gate and an up, or parts of them."""
    cuts = {"whole": (slice(0, FFN), slice(FFN, 2 * FFN)), "rows": (slice(1, 3), slice(FFN + 1, FFN + 3))}
    places = cuts.get(pieces, cuts["whole"])
    columns = slice(1, 3) if pieces == "columns" else slice(None)
    return [(t[place, columns], o[place, columns]) for t, o in zip(target, origin, strict=True) for place in places]


@pytest.mark.parametrize(("pieces", "blocks"), [("whole", 1), ("rows", 1), ("columns", 1)])
def test_all_experts_of_a_layer_are_one_copy(pieces: str, blocks: int) -> None:
    target, origin = make_sides()
    copies = list_copies(target, origin, pieces)
    random.Random(0).shuffle(copies)
    for t, o in copies:
        t.copy_(o)
    expected = target.clone()
    target.zero_()
    joined = join_copies(copies)
    for t, o in joined:
        t.copy_(o)
    assert torch.equal(target, expected) and expected.any() and len(joined) == blocks


def test_copies_that_are_not_alike_stay_apart() -> None:
    """Other shapes, other distances, other storages, other types."""
    target, origin = make_sides()
    other, wide = make_sides()[1], origin.double()
    alike = list_copies(target, origin, "rows")
    assert len(join_copies([alike[0], (target[1, :3], origin[1, :3])])) == 2
    assert len(join_copies([alike[0], (target[1, 1:3], other[1, 1:3])])) == 2
    assert len(join_copies([alike[0], (target[1, 1:3], wide[1, 1:3])])) == 2
    assert len(join_copies([alike[0], alike[2], alike[3]])) == 2  # the third is nearer
    assert len(join_copies([(target[0], origin[1]), (target[1], origin[0])])) == 2  # turned around
    assert join_copies([]) == []
