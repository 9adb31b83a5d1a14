# SPDX-License-Identifier: Apache-2.0
"""The gated activation has the bits of the formula that autograd differentiates, and keeps its input only."""

from __future__ import annotations

import megatron_rl.parallel  # noqa: F401  the CPU runtime comes before megatron.core  # isort: skip

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from megatron_rl.models.experts import ClampedActivation
from megatron_rl.models.stages import GatedActivation


def write_out(gate_and_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    gate, up = gate_and_up.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("shape", [(37, 1, 44), (640, 1, 640), (5, 14)])
def test_bits_of_the_formula(shape: tuple[int, ...], is_gelu: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (4 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    gradient = torch.randn((*shape[:-1], shape[-1] // 2), generator=generator).to(dtype)
    config: Any = SimpleNamespace(activation_func=F.gelu if is_gelu else F.silu)
    found, expected = GatedActivation(config)(values), write_out(values, is_gelu)
    assert torch.equal(found, expected)
    (of_found,), (of_expected,) = (torch.autograd.grad(x, values, gradient) for x in (found, expected))
    assert torch.equal(of_found, of_expected) and of_found.abs().max() > 1


def test_clamped_gates_are_those_of_transformers() -> None:
    """In float64; a third of the gates and two thirds of the ups exceed the limit, beyond which no gradient passes."""
    values = (8 * torch.randn(50, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).requires_grad_()
    gate, up = values.chunk(2, -1)
    of_experts: Any = SimpleNamespace(limit=7.0, alpha=1.702)
    expected = GptOssExperts._apply_gate(of_experts, torch.stack([gate, up], -1).flatten(-2))
    found = ClampedActivation(7.0)(values)
    assert (found - expected).abs().max() < 1e-13
    (of_found,), (of_expected,) = (torch.autograd.grad(x.sum(), values, retain_graph=True) for x in (found, expected))
    assert (of_found - of_expected).abs().max() < 1e-13
    assert 0.1 < (of_found == 0).double().mean() < 0.5 and of_found.abs().max() > 1


def test_it_keeps_its_input_only() -> None:
    kept: list[int] = []
    values = torch.randn(6, 8, requires_grad=True)
    config: Any = SimpleNamespace(activation_func=F.silu)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()), lambda x: x):
        GatedActivation(config)(values)
    assert kept == [values.data_ptr()]
