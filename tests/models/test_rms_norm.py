# SPDX-License-Identifier: Apache-2.0
"""The norm has the bits of torch's, forward and backward, and keeps its input only.

Not covered: CUDA, where torch's own norm runs.
"""

from __future__ import annotations

import megatron_rl.parallel  # noqa: F401  the CPU runtime comes before megatron.core  # isort: skip

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.models.stages import RMSNorm


def build(size: int, zero_centered: bool = False, dtype: torch.dtype = torch.float32) -> RMSNorm:
    config: Any = SimpleNamespace(
        layernorm_zero_centered_gamma=zero_centered, params_dtype=dtype, sequence_parallel=False
    )
    norm = RMSNorm(config, size, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(size, generator=torch.Generator().manual_seed(1)) + 0.1)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 8), (37, 1, 44), (640, 1, 128), (33, 4, 32), (50, 1, 3, 16)])
def test_bits_of_torch(shape: tuple[int, ...], is_zero_centered: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    gradient, norm = torch.randn(shape, generator=generator).to(dtype), build(shape[-1], is_zero_centered, dtype)
    wide = (x.float(), 1 + norm.weight.float()) if is_zero_centered else (x, norm.weight)
    expected = F.rms_norm(wide[0], shape[-1:], wide[1], 1e-5).type_as(x)
    found = norm(x)
    assert torch.equal(found, expected)
    # With a residual, whose gradient comes first: the order of three terms counts.
    of_found, of_expected = (torch.autograd.grad(y + 0.3 * x, (x, norm.weight), gradient) for y in (found, expected))
    assert torch.equal(of_found[0], of_expected[0]) and torch.equal(of_found[1], of_expected[1])
    assert of_found[0].abs().max() > 0.01


def test_a_frozen_weight_gets_no_gradient() -> None:
    norm, x = build(8), torch.randn(3, 8, requires_grad=True)
    norm.weight.requires_grad_(False)
    norm(x).sum().backward()
    assert norm.weight.grad is None and x.grad is not None and x.grad.abs().max() > 0.01


def test_it_keeps_its_input_only() -> None:
    kept: list[int] = []
    norm, x = build(8), torch.randn(3, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.numel()), lambda saved: saved):
        norm(x)
    assert kept == [24, 8, 3], "the input, the weight and a number per row"
