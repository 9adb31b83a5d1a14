# SPDX-License-Identifier: Apache-2.0
"""Gradients of gates and experts equal a plain loop over tokens and experts in float64, with any recomputation.

The inputs of a mixture of experts in an update, and the gradients of its outputs, are caught from the model in float32
and put through the loop. Not covered: layouts (tests/training/test_actor.py), replayed routes
(tests/training/test_routing.py), the layers around it (tests/models/test_gpt.py), GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from actor_runs import ALGORITHM, Case, build_actor, build_batch
from distributed import run_ranks
from megatron_rl.models.routing import RoutedRouter
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.packed_experts import name_expert, split_experts
from megatron_rl.weights.shard_box import box_slices
from tiny_models import save_tiny_model

RECOMPUTATION = ("none", "selective", "full")
# Softmax over the chosen experts, over all of them, and sigmoids with a bias; the last beside a shared expert.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(family="qwen3_moe"),
    "shares": dict(family="qwen3_moe", norm_topk_prob=False, num_experts=8),
    "glm4_moe": dict(family="glm4_moe"),
}


@dataclass
class Caught:
    """Inputs [t, h] of one mixture of experts and the gradients of its outputs, by microbatch."""

    given: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)

    def listen(self, block: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
        """A hook of a forward; one whose output has no gradient is repeated, or needs none."""
        if output[0].requires_grad:
            self.given.append(inputs[0].detach().flatten(0, -2))
            output[0].register_hook(lambda gradient: self.gradients.append(gradient.flatten(0, -2)))


def choose(shape: ModelShape, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[list[int], torch.Tensor]:
    """The experts of one token, and their shares."""
    if shape.router is not None:
        assert bias is not None
        scores = logits.sigmoid()
        experts = (scores + bias).topk(shape.experts_per_token).indices
        return experts.tolist(), scores[experts] / scores[experts].sum() * shape.router.scale
    experts = logits.topk(shape.experts_per_token).indices
    return experts.tolist(), logits[experts].softmax(0) if shape.normalizes_shares else logits.softmax(0)[experts]


def loop(shape: ModelShape, weights: dict[str, torch.Tensor], caught: Caught) -> dict[str, torch.Tensor]:
    """Gradients of the gate and of every matrix of an expert, in float64; names are those within the block."""
    trained = {name: w.double().requires_grad_() for name, w in weights.items() if not name.endswith("_bias")}
    bias = next((w.double() for name, w in weights.items() if name.endswith("_bias")), None)
    for given, gradients in zip(caught.given, caught.gradients, strict=True):
        for x, gradient in zip(given.double(), gradients.double(), strict=True):
            experts, shares = choose(shape, trained["gate.weight"] @ x, bias)
            output = torch.zeros_like(x)
            for expert, share in zip(experts, shares, strict=True):
                gate, up, down = (trained[f"experts.{expert}.{what}_proj.weight"] for what in ("gate", "up", "down"))
                output = output + share * (down @ (F.silu(gate @ x) * (up @ x)))
            (output * gradient).sum().backward()
    return {name: w.grad if w.grad is not None else torch.zeros_like(w) for name, w in trained.items()}


def measure(rank: int, world_size: int, path: Path) -> dict[str, dict[str, float]]:
    """Return the distances of `_measure` for every setting of recomputation."""
    return {recompute: _measure(path, recompute) for recompute in RECOMPUTATION}


def _measure(path: Path, recompute: str) -> dict[str, float]:
    """Gate or expert matrix -> distance of its gradients from the loop's, relative to the largest of its layer."""
    case = Case(1, {}, dict(recompute_granularity=recompute))
    actor = build_actor(case, path)
    model, shape = actor.model, actor.model.shape
    layers = {}
    stage: Any = model.stages[0]
    for number, layer in enumerate(stage.decoder.layers):
        if shape.has_experts(number):
            assert isinstance(layer.mlp.router, RoutedRouter)
            layers[number] = Caught()
            layer.mlp.register_forward_hook(layers[number].listen)
    batch = build_batch(model, case)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    actor.forward_backward(batch, ALGORITHM)
    trained: dict[str, Any] = {name: p for name, p in model.stages.named_parameters() if p.requires_grad}
    grads = split_experts({name: p.main_grad for name, p in trained.items()}, name_expert)
    weights, found = defaultdict(dict), defaultdict(dict)
    for p in model.placements(0):
        layer, _, name = p.hf_name.removeprefix("model.layers.").partition(".mlp.")
        if name.startswith(("gate.", "experts.")) and layer.isdigit() and int(layer) in layers:
            weights[int(layer)][name] = model.params[p.param][box_slices(p.local_box)].clone()
            if p.param in grads:
                found[int(layer)][name] = grads[p.param][box_slices(p.local_box)]
    gaps: dict[str, float] = {}
    for number, caught in layers.items():
        assert len(caught.given) == len(batch.slices) >= 2
        expected = loop(shape, weights[number], caught)
        assert expected.keys() == found[number].keys()
        for what in ("gate.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight"):
            names = [name for name in expected if name.endswith(what)]
            largest = max(expected[name].abs().max().item() for name in names)
            gap = max((found[number][name] - expected[name]).abs().max().item() for name in names)
            gaps[what] = max(gaps.get(what, 0.0), gap / largest)
    return gaps


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, settings in MODELS.items():
        save_tiny_model(found[name], num_hidden_layers=2, **settings)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_a_loop_in_float64(name: str, paths: dict[str, Path]) -> None:
    """Float32 rounding leaves 2e-7 to 6e-7; recomputation changes no bit."""
    (found,) = run_ranks(measure, 1, paths[name], timeout=100)
    gaps = found["none"]
    assert len(gaps) == 4 and max(gaps.values()) <= 1e-6, gaps
    assert found["selective"] == found["full"] == gaps
