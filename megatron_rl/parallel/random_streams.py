# SPDX-License-Identifier: Apache-2.0
"""Protection of the trainer's random number generators from code that seeds or draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def keep_random_streams() -> Iterator[None]:
    """Restore the generators of Python, numpy, torch and the current GPU after the block, even after an error."""
    python, legacy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices, device_type="cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
