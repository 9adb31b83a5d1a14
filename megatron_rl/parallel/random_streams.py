# SPDX-License-Identifier: Apache-2.0
"""The trainer's random numbers, kept from code that seeds and draws as it likes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def keep_random_streams() -> Iterator[None]:
    """Afterwards, also after an error, Python, numpy, torch and every CUDA device draw what they would have drawn."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()), device_type="cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
