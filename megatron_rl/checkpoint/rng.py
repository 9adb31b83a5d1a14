# SPDX-License-Identifier: Apache-2.0
"""The random number generators of one rank: torch, CUDA, numpy, Python, and megatron-core's named streams."""

from __future__ import annotations

import random

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

_STREAM = "megatron."


def read_rng() -> dict[str, torch.Tensor]:
    """The state of all generators, as tensors by name."""
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
    streams = get_cuda_rng_tracker().get_states()
    return states | {_STREAM + name: state for name, state in streams.items() if torch.is_tensor(state)}


def restore_rng(states: dict[str, torch.Tensor]) -> None:
    """Set all generators to what `read_rng` returned (CUDA's only where there is CUDA)."""
    torch.set_rng_state(states["torch"])
    version, *python = states["python"].tolist()
    gauss = states["python.gauss"].tolist()
    random.setstate((version, tuple(python), gauss[0] if gauss else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, states["numpy.gauss"].item()))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tracker = get_cuda_rng_tracker()
    known = tracker.get_states()
    saved = {name.removeprefix(_STREAM): state for name, state in states.items() if name.startswith(_STREAM)}
    tracker.set_states(known | {name: state for name, state in saved.items() if name in known})
