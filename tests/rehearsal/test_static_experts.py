# SPDX-License-Identifier: Apache-2.0
"""Experts of one rank in fixed shapes, as a graph has to run them: what docs/cuda_graph.md says can be built.

Rows are sorted by expert with a stable sort, of which as many rows are taken as there are choices, and the products
read their offsets on the device. That equals megatron-core's `permute` and `unpermute` around a product per expert to
the last bit, and a recorded graph replays it for other routes than those of its capture. Not covered: the program's own
layers, which still read the counts on the host; tensor and expert parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.rehearsal.recorder import CaptureError, recorded_graphs

MOE: Any = import_module("megatron.core.transformer.moe.moe_utils")  # after megatron_rl
TOKENS, EXPERTS, CHOICES, WIDTH, COLUMNS = 24, 4, 2, 16, 8


@dataclass
class Layer:
    """Inputs of a layer, with gradients; the last expert gets nothing where `is_skewed`."""

    x: torch.Tensor
    scores: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def draw(cls, seed: int, dtype: torch.dtype, *, is_skewed: bool) -> Layer:
        """Random values."""
        generator = torch.Generator().manual_seed(seed)
        sizes = (TOKENS, WIDTH), (TOKENS, EXPERTS), (EXPERTS, COLUMNS, WIDTH), (EXPERTS, WIDTH, COLUMNS)
        x, scores, up, down = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
        if is_skewed:
            scores[:, -1] = -100
        return cls(*(tensor.requires_grad_() for tensor in (x, scores, up, down)))

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [self.x, self.scores, self.up, self.down]

    def route(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Shares and choices, [tokens, experts]."""
        chosen = torch.zeros_like(self.scores, dtype=torch.bool).scatter(1, self.scores.topk(CHOICES).indices, True)
        return self.scores.masked_fill(~chosen, -torch.inf).softmax(-1), chosen


def run_today(layer: Layer) -> torch.Tensor:
    """Shapes follow the counts."""
    shares, chosen = layer.route()
    rows, gates, order = MOE.permute(layer.x, chosen, probs=shares, num_out_tokens=TOKENS * CHOICES)
    counts = chosen.sum(0).tolist()
    inner = F.silu(_multiply_each(rows, counts, layer.up)) * gates[:, None]
    return MOE.unpermute(_multiply_each(inner, counts, layer.down), order, layer.x.shape)


def _multiply_each(rows: torch.Tensor, counts: list[int], weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.linear(piece, matrix) for piece, matrix in zip(rows.split(counts), weight, strict=True)])


def run_static(layer: Layer) -> torch.Tensor:
    """The same shapes whatever is chosen."""
    shares, chosen = layer.route()
    order = (~chosen.T).flatten().byte().argsort(stable=True)[: TOKENS * CHOICES]
    rows, ends = order % TOKENS, chosen.sum(0).cumsum(0).int()
    inner = F.grouped_mm(layer.x.index_select(0, rows), layer.up.transpose(1, 2), offs=ends)
    gates = shares.T.flatten().index_select(0, order)
    found = F.grouped_mm(F.silu(inner) * gates[:, None], layer.down.transpose(1, 2), offs=ends)
    return MOE.unpermute(found, rows, layer.x.shape)


def differentiate(run, layer: Layer) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """The result, and the gradients of all inputs."""
    result = run(layer)
    return [result.detach(), *torch.autograd.grad(result, layer.tensors(), torch.ones_like(result))]


@pytest.mark.parametrize("is_skewed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fixed_shapes_have_the_bits_of_today(dtype: torch.dtype, is_skewed: bool) -> None:
    layer = Layer.draw(0, dtype, is_skewed=is_skewed)
    found, expected = differentiate(run_static, layer), differentiate(run_today, layer)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(bool(gradient.any()) for gradient in expected)


def test_graph_is_replayed_for_other_routes() -> None:
    static = Layer.draw(0, torch.float32, is_skewed=False)
    with recorded_graphs():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
            found = differentiate(run_static, static)
        for seed, is_skewed in ((1, False), (2, True), (3, False)):
            layer = Layer.draw(seed, torch.float32, is_skewed=is_skewed)
            with torch.no_grad():
                for buffer, values in zip(static.tensors(), layer.tensors(), strict=True):
                    buffer.copy_(values)
            graph.replay()
            expected = differentiate(run_today, layer)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_runs_today_is_refused() -> None:
    layer = Layer.draw(0, torch.float32, is_skewed=False)
    with recorded_graphs(), pytest.raises(CaptureError, match="masked_select"):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=torch.cuda.graph_pool_handle()):
            run_today(layer)
