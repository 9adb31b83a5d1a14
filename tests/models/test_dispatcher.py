# SPDX-License-Identifier: Apache-2.0
"""Tokens are sorted by expert in fixed shapes with the bits of megatron-core's dispatcher, and a graph can hold it.

Compared on one rank and with two or four ranks per expert: results, and gradients of tokens, gates and experts, in
float32 and bfloat16, with an expert that gets nothing. Not covered: whole updates, which are in
tests/rehearsal/test_recorded_experts.py, and GPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed import run_ranks
from megatron_rl.models.gpt import build_gpt_stages, build_transformer_config
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from shards import make_shape
from tools.rehearsal.recorder import CaptureError, recorded_graphs

TOKENS, EXPERTS = 24, 6
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "tp2": (2, dict(tp_size=2)),
    "tp4": (4, dict(tp_size=4)),
    "tp2-etp1": (2, dict(tp_size=2, etp_size=1)),
}
DTYPES = (torch.float32, torch.bfloat16)


class Pair:
    """A mixture layer of this rank and its inputs; `theirs` is megatron-core's dispatcher."""

    def __init__(self, sizes: dict[str, int], world_size: int, dtype: torch.dtype) -> None:
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        layout = ParallelLayout(world_size, **sizes)
        shape, groups = make_shape("qwen3_moe", num_layers=1, num_experts=EXPERTS), build_groups(layout)
        config = build_transformer_config(shape, layout, dtype=dtype, sequence_parallel=layout.tp_size > 1)
        model: Any = build_gpt_stages(shape, config, groups)[0]
        self.layer = model.decoder.layers[0].mlp
        self.ours, every = self.layer.token_dispatcher, list(range(EXPERTS))
        self.theirs: Any = MoEAlltoAllTokenDispatcher(EXPERTS, every, config, groups.collection)
        torch.manual_seed(groups.at.tp)
        for parameter in self.layer.parameters():
            parameter.data.normal_(std=0.3)
        self.x = torch.empty(TOKENS, 1, shape.hidden_size, dtype=dtype, requires_grad=True)
        self.gradient = torch.randn(self.x.shape).to(dtype)

    def draw(self, seed: int, *, is_skewed: bool) -> None:
        """Draw other tokens into the same storage; routers avoid the last expert if `is_skewed`."""
        torch.manual_seed(seed)
        values = torch.randn(self.x.shape)
        if is_skewed:
            values[..., 0] = 100
            self.layer.router.weight.data[:, 0] = 1.0
            self.layer.router.weight.data[-1, 0] = -1.0
        self.x.data.copy_(values)

    def run(self, dispatcher: Any) -> list[torch.Tensor]:
        """The result, and the gradients of the tokens and of all weights."""
        self.layer.token_dispatcher = dispatcher
        output, _ = self.layer(self.x)
        weights = [*self.layer.parameters()]
        return [output.detach(), *torch.autograd.grad(output, [self.x, *weights], self.gradient)]

    def agree(self) -> list[bool]:
        """Return for each result of `run` whether both dispatchers agree bit for bit and it is not zero."""
        found, expected = self.run(self.ours), self.run(self.theirs)
        return [torch.equal(a, b) and bool(b.any()) for a, b in zip(found, expected, strict=True)]


def compare(rank: int, world_size: int, names: list[str]) -> dict[str, list[bool]]:
    found = {}
    for name in names:
        for dtype in DTYPES:
            pair = Pair(LAYOUTS[name][1], world_size, dtype)
            for is_skewed in (False, True):
                pair.draw(7 + rank, is_skewed=is_skewed)
                found[f"{name} {dtype} {is_skewed}"] = pair.agree()
    return found


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_fixed_shapes_have_the_bits_of_megatron_core(world_size: int) -> None:
    names = [name for name, (size, _) in LAYOUTS.items() if size == world_size]
    for found in run_ranks(compare, world_size, names):
        assert found and all(all(equal) and len(equal) == 5 for equal in found.values()), found


def replay(rank: int, world_size: int, names: list[str]) -> dict[str, list[bool]]:
    """A graph that was recorded with some routes is replayed with others."""
    found = {}
    for name in names:
        pair = Pair(LAYOUTS[name][1], world_size, torch.float32)
        pair.draw(rank, is_skewed=False)
        with recorded_graphs():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
                results = pair.run(pair.ours)
            for seed, is_skewed in ((10, False), (20, True), (30, False)):
                pair.draw(seed + rank, is_skewed=is_skewed)
                graph.replay()
                replayed, expected = [x.clone() for x in results], pair.run(pair.theirs)
                equal = [torch.equal(a, b) for a, b in zip(replayed, expected, strict=True)]
                found[f"{name} {seed}"] = equal
            with pytest.raises(CaptureError, match="masked_select|Tensor.numpy|Tensor.tolist"):
                with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=torch.cuda.graph_pool_handle()):
                    pair.run(pair.theirs)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_graph_is_replayed_for_other_routes(world_size: int) -> None:
    """And megatron-core's dispatcher cannot be captured."""
    names = [name for name, (size, _) in LAYOUTS.items() if size == world_size]
    for found in run_ranks(replay, world_size, names):
        assert found and all(map(all, found.values())), found
