# SPDX-License-Identifier: Apache-2.0
"""The experts of a rank in one product equal megatron-core's one after the other, bit for bit.

Not covered: layouts (tests/training/test_actor.py), adapters and NF4 (tests/training/test_lora.py), the kernel of GPUs,
which adds up in another order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from distributed import run_ranks
from megatron_rl.models import experts
from megatron_rl.models.experts import GroupedExperts, RowCounts, multiply
from megatron_rl.models.gpt import ColumnParallelLinear, RowParallelLinear, build_transformer_config
from megatron_rl.models.stages import GatedActivation
from megatron_rl.parallel import batch_invariant
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from shards import make_shape

COUNTS = [3, 0, 17, 1, 0, 40]


def multiply_in_turn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(x.split(COUNTS), weight, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(32, 48), (8, 64), (6, 10)])
def test_a_product_equals_one_after_the_other(n: int, k: int, dtype: torch.dtype) -> None:
    """With its gradients, experts without tokens, and a gradient whose rows are one; 6 and 10 do not align."""
    torch.manual_seed(0)
    x, weight = torch.randn(sum(COUNTS), k, dtype=dtype), torch.randn(len(COUNTS), n, k, dtype=dtype)
    for gradient in (torch.randn(sum(COUNTS), n, dtype=dtype), torch.ones(1, 1, dtype=dtype).expand(sum(COUNTS), n)):
        found = []
        for product in (lambda a, b: multiply(a, b, RowCounts(COUNTS, a)), multiply_in_turn):
            inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            output = product(*inputs)
            found.append([output, *torch.autograd.grad(output, inputs, gradient)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_rank_without_tokens_has_gradients_of_zero() -> None:
    x, weight = torch.randn(0, 32, requires_grad=True), torch.randn(3, 16, 32, requires_grad=True)
    output = multiply(x, weight, RowCounts([0, 0, 0], x))
    output.sum().backward()
    assert output.shape == (0, 16) and weight.grad is not None and not weight.grad.any()


def compare(rank: int, world_size: int) -> dict[str, bool]:
    """Output, and gradients of tokens, shares and weights."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    shape = make_shape("qwen3_moe", num_experts=len(COUNTS))
    config = build_transformer_config(shape, ParallelLayout(1), dtype=torch.float32)
    groups = build_groups(ParallelLayout(1)).collection
    spec = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=GatedActivation)
    theirs = SequentialMLP(len(COUNTS), config, spec, pg_collection=groups)
    ours: Any = GroupedExperts(len(COUNTS), config, pg_collection=groups)
    torch.manual_seed(0)
    for parameter in ours.parameters():
        parameter.data.normal_()
    for expert, mlp in enumerate(theirs.local_experts):
        for name in ("linear_fc1", "linear_fc2"):
            getattr(mlp, name).weight.data.copy_(ours[name].weight[expert])
    x, shares = torch.randn(sum(COUNTS), shape.hidden_size), torch.rand(sum(COUNTS))
    gradient, found = torch.randn_like(x), []
    for module in (theirs, ours):
        inputs = [x.clone().requires_grad_(), shares.clone().requires_grad_()]
        output, bias = module(inputs[0], torch.tensor(COUNTS), inputs[1])
        output.backward(gradient)
        assert bias is None
        found.append([output, *(x.grad for x in inputs)])
    for name in ("linear_fc1", "linear_fc2"):
        found[0].append(torch.stack([getattr(mlp, name).weight.grad for mlp in theirs.local_experts]))
        found[1].append(ours[name].weight.grad)
    names = ("output", "tokens", "shares", "linear_fc1", "linear_fc2")
    return {name: torch.equal(a, b) for name, a, b in zip(names, *found, strict=True)}


def test_experts_equal_those_of_megatron_core() -> None:
    (found,) = run_ranks(compare, 1)
    assert all(found.values()), found


def test_a_token_keeps_its_bits_whatever_else_its_expert_gets() -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, 96, 64)
    x = torch.randn(40, 64)
    multiply = partial(experts.multiply_in_turn, batch_invariant.multiply)
    together = multiply(x, weight, RowCounts([30, 10], x))
    alone = [multiply(x[i : i + 1], weight, RowCounts([1, 0] if i < 30 else [0, 1], x)) for i in range(40)]
    assert torch.equal(together, torch.cat(alone))
