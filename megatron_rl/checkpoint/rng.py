# SPDX-License-Identifier: Apache-2.0
"""Random number generators of one rank: torch, CUDA, numpy, Python, and megatron-core's named streams."""

from __future__ import annotations

import random

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.typed_torch import not_none

_STREAM = "megatron."


def read_rng() -> dict[str, torch.Tensor]:
    """Return the state of all generators, as tensors by name."""
    version, python, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    assert name == "MT19937", f"numpy's legacy generator is {name}"
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *python], dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.array([*keys, position, has_gauss], dtype=np.int64)),
        "numpy.gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    for name, state in not_none(get_cuda_rng_tracker()).get_states().items():
        # with CUDA graphs a stream is a generator registered with the graphs, else its state
        states[_STREAM + name] = state.get_state() if isinstance(state, torch.Generator) else state
    return states


def restore_rng(states: dict[str, torch.Tensor]) -> None:
    """Set all generators to states from `read_rng` (CUDA's only if available)."""
    torch.set_rng_state(states["torch"])
    version, *python = states["python"].tolist()
    gauss = states["python.gauss"].tolist()
    random.setstate((version, tuple(python), gauss[0] if gauss else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, states["numpy.gauss"].item()))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tracker = not_none(get_cuda_rng_tracker())
    known = tracker.get_states()
    saved = {name.removeprefix(_STREAM): state for name, state in states.items() if name.startswith(_STREAM)}
    for name in known.keys() & saved.keys():
        if isinstance(known[name], torch.Generator):
            known[name].set_state(saved[name])
        else:
            known[name] = saved[name]
    tracker.set_states(known)
