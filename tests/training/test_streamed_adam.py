# SPDX-License-Identifier: Apache-2.0
"""Adam with moments on the host equals torch's fused Adam, bit for bit.

On a CPU; copies between host and GPU are covered by rehearsals alone, and their overlap with kernels by nothing.
"""

from __future__ import annotations

import copy

import pytest
import torch

from megatron_rl.checkpoint.pieces import MOMENTS
from megatron_rl.training import streamed_adam
from megatron_rl.training.streamed_adam import StreamedAdam

SIZES = [(7, 5), (300,), (2, 2), (64, 3)]


def make_parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def update(params: list[torch.nn.Parameter], adam: torch.optim.AdamW, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        adam.found_inf = torch.tensor(float(step == 2))  # this step changes nothing
        adam.step()


def make(kind: type[torch.optim.AdamW], params: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    groups = [dict(params=params[:2], weight_decay=0.1), dict(params=params[2:], lr=0.01)]
    return kind(groups, lr=torch.tensor(0.05), fused=True)


@pytest.mark.parametrize("size, chunks", [(1, [1, 1, 1, 1]), (350 * 8, [2, 2]), (1 << 30, [2, 2])])
def test_weights_and_moments_equal_those_of_adam(monkeypatch: pytest.MonkeyPatch, size: int, chunks: list[int]) -> None:
    """With one parameter at a time, and with all of a group; an unsound step leaves weights and moments."""
    monkeypatch.setattr(streamed_adam, "STREAMED_BYTES", size)
    found = [len(chunk) for half in (SIZES[:2], SIZES[2:]) for chunk in streamed_adam._split([*map(torch.empty, half)])]
    assert found == chunks
    plain, streamed = make_parameters(), make_parameters()
    adam, other = make(torch.optim.AdamW, plain), make(StreamedAdam, streamed)
    update(plain, adam, range(4))
    update(streamed, other, range(4))
    assert [len(group["params"]) for group in other.param_groups] == [2, 2]
    for p, q in zip(plain, streamed, strict=True):
        assert torch.equal(p, q) and adam.state[p].keys() == other.state[q].keys()
        assert all(torch.equal(adam.state[p][name], other.state[q][name]) for name in adam.state[p])


def test_moments_of_a_checkpoint_continue() -> None:
    """They are moved to the pinned memory, which stays the same over steps."""
    plain, first, second = make_parameters(), make_parameters(), make_parameters()
    adam, saved, resumed = make(torch.optim.AdamW, plain), make(StreamedAdam, first), make(StreamedAdam, second)
    update(plain, adam, range(5))
    update(first, saved, range(3))
    for p, q in zip(first, second, strict=True):
        q.data.copy_(p.data)
        resumed.state[q] = copy.deepcopy(dict(saved.state[p]))
    update(second, resumed, range(3, 4))
    places = [resumed.state[q][name].data_ptr() for q in second for name in MOMENTS]
    update(second, resumed, range(4, 5))
    assert [resumed.state[q][name].data_ptr() for q in second for name in MOMENTS] == places
    assert all(torch.equal(p, q) for p, q in zip(plain, second, strict=True))
