# SPDX-License-Identifier: Apache-2.0
"""Random numbers continue after a resume, also in streams registered with CUDA graphs.

Not covered: CUDA generators.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megatron_rl.parallel.collectives import get_streams, read_rng, restore_rng


@pytest.fixture(autouse=True)
def streams() -> Iterator[dict[str, torch.Tensor | torch.Generator]]:
    """One stream as a state and one as a generator; the previous streams are restored afterwards."""
    tracker = get_streams()
    before = tracker.get_states()
    made = {"plain": torch.Generator().manual_seed(3).get_state(), "of graphs": torch.Generator().manual_seed(4)}
    tracker.set_states(made)
    yield made
    tracker.set_states(before)


def draw(streams: dict[str, torch.Tensor | torch.Generator]) -> list[float]:
    """Draw a number from every generator and from both streams, as they are after `restore_rng`."""
    plain = torch.Generator()
    plain.set_state(get_streams().get_states()["plain"])
    return [
        torch.rand(()).item(),
        random.random(),
        float(np.random.rand()),
        random.gauss(0, 1),
        float(np.random.randn()),
        torch.rand((), generator=plain).item(),
        torch.rand((), generator=streams["of graphs"]).item(),
    ]


@pytest.mark.parametrize("has_cached", [False, True])
def test_all_generators_go_on(streams: dict[str, torch.Tensor | torch.Generator], has_cached: bool) -> None:
    """Those of normal numbers make two at a time: a second one that is waiting is part of the state."""
    random.seed(1), np.random.seed(1)
    if has_cached:
        random.gauss(0, 1), np.random.randn()
    saved = {name: state.clone() for name, state in read_rng().items()}
    first, later = draw(streams), draw(streams)
    assert all(first[i] != later[i] for i in range(len(first)) if i != 5), "all but the stream that is a state"
    restore_rng(saved)
    assert draw(streams) == first
    generator = get_streams().get_states()["of graphs"]
    assert generator is streams["of graphs"], "graphs keep the generator that they captured"


@pytest.mark.parametrize("kind", ["plain", "of graphs"])
def test_a_stream_changes_its_kind(streams: dict[str, torch.Tensor | torch.Generator], kind: str) -> None:
    """A checkpoint of an eager run is resumed with graphs, or the other way round."""
    saved = read_rng()
    other = {"plain": "of graphs", "of graphs": "plain"}[kind]
    saved[f"megatron.{kind}"] = saved[f"megatron.{other}"].clone()
    restore_rng(saved)
    found = get_streams().get_states()[kind]
    state = found.get_state() if isinstance(found, torch.Generator) else found
    assert torch.equal(state, saved[f"megatron.{kind}"])
