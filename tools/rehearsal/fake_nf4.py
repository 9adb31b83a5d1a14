# SPDX-License-Identifier: Apache-2.0
"""A fake bitsandbytes for NF4: codes, scales and matrices with sizes and without values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from megatron_rl.weights import quantization


@dataclass
class _State:
    absmax: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    blocksize: int
    quant_type: str


def _quantize(values: torch.Tensor, *, blocksize: int, quant_type: str) -> tuple[torch.Tensor, _State]:
    assert values.dim() == 1 and len(values) % blocksize == 0
    scales = values.new_empty(len(values) // blocksize, dtype=torch.float32)
    state = _State(scales, values.shape, values.dtype, blocksize, quant_type)
    return values.new_empty(len(values) // 2, 1, dtype=torch.uint8), state


def _dequantize(codes: torch.Tensor, state: _State) -> torch.Tensor:
    assert 2 * codes.numel() == state.shape.numel() == state.absmax.numel() * state.blocksize
    assert codes.device == state.absmax.device
    return codes.new_empty(state.shape, dtype=state.dtype)


@contextmanager
def fake_nf4() -> Iterator[None]:
    """Replace the NF4 kernels within the block."""
    kernels: Any = SimpleNamespace(quantize_4bit=_quantize, dequantize_4bit=_dequantize, QuantState=_State)
    with patch.object(quantization, "_load", lambda: kernels):
        yield
