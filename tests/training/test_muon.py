# SPDX-License-Identifier: Apache-2.0
"""Muon against a plain loop over Hugging Face's matrices, in every kind of layout; its states in checkpoints.

Not covered: bfloat16 training beyond the iteration itself, CUDA graphs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from role_setups import take_step
from torch.optim._muon import _zeropower_via_newtonschulz
from transformers import AutoModelForCausalLM

from actor_runs import (
    ACTOR,
    ALGORITHM,
    Case,
    _step_with_transformers,
    build_actor,
    build_batch,
    list_pieces,
    merge_weights,
    score_with_transformers,
)
from distributed import run_ranks
from megatron_rl.training.muon import MOMENTUM, orthogonalize
from megatron_rl.weights.megatron_layout import padded_vocab_size
from megatron_rl.weights.model_config import load_model_shape, model_shape_from_config
from megatron_rl.weights.packed_experts import split_huggingface_experts
from tiny_models import VOCAB_SIZE, save_tiny_model

UPDATES = 3


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in ("qwen2", "qwen3_moe"):
        found[family] = tmp_path_factory.mktemp(family)
        save_tiny_model(found[family], family, num_hidden_layers=2)
    return found


@pytest.mark.parametrize("shape", [(8, 8), (5, 40), (40, 5), (1, 7)])
def test_the_iteration_is_torchs_to_the_last_bit(shape: tuple[int, int]) -> None:
    """In bfloat16, the only type that torch's own has; in float64 the singular values come near 1."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs = _zeropower_via_newtonschulz(matrix.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(orthogonalize(matrix.bfloat16()), theirs)
    values = torch.linalg.svdvals(orthogonalize(matrix.double()))
    assert values.min() > 0.6 and values.max() < 1.3


class MuonLoop:
    """AdamW for parameters other than layer matrices, and Muon by its definition, one Hugging Face tensor at a time."""

    def __init__(self, model: torch.nn.Module, path: Path) -> None:
        self.shape = model_shape_from_config(model.config.to_dict(), source="the model")  # pyright: ignore
        named = dict(model.named_parameters())
        self.matrices = {name: p for name, p in named.items() if ".layers." in name and p.ndim > 1}
        rest = [p for name, p in named.items() if name not in self.matrices]
        decayed = [p for p in rest if p.ndim > 1]
        self.adam = torch.optim.AdamW(
            [{"params": decayed}, {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0}],
            weight_decay=ACTOR["weight_decay"],
            betas=(0.9, 0.95),
            eps=1e-8,
        )
        self.param_groups = self.adam.param_groups
        self.momentum = {name: torch.zeros_like(p) for name, p in self.matrices.items()}

    def zero_grad(self) -> None:
        for p in (*self.matrices.values(), *(p for group in self.param_groups for p in group["params"])):
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.adam.step()
        lr = self.param_groups[0]["lr"]
        for name, p in self.matrices.items():
            assert p.grad is not None
            self.momentum[name] = MOMENTUM * self.momentum[name] + (1 - MOMENTUM) * p.grad
            looked_ahead = MOMENTUM * self.momentum[name] + (1 - MOMENTUM) * p.grad
            update = torch.stack([self._direction(name, m) for m in looked_ahead]) if p.ndim == 3 else None
            if update is None:
                update = self._direction(name, looked_ahead)
            p.mul_(1 - lr * ACTOR["weight_decay"]).sub_(lr * update)

    def _direction(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Experts' gate and up lie in one tensor of transformers, and are two matrices of checkpoints."""
        parts = matrix.chunk(2) if "gate_up_proj" in name else (matrix,)
        return torch.cat([orthogonalize(part) * 0.2 * math.sqrt(max(part.shape)) for part in parts])


def train_with_transformers(path: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms and weights after three updates."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = MuonLoop(model, path)
    with torch.no_grad():
        old = [logprobs for logprobs, _ in score_with_transformers(model)]
    norms = []
    for step in range(1, UPDATES + 1):
        for group in optimizer.param_groups:
            group["lr"] = ACTOR["lr"] * min(1.0, step / ACTOR["lr_warmup_steps"])
        norms.append(_step_with_transformers(model, optimizer, old)["policy/grad_norm"])  # pyright: ignore
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return norms, split_huggingface_experts(optimizer.shape, weights)


def _train(rank: int, world_size: int, path: Path, case: Case) -> Any:
    actor = build_actor(replace(case, actor=case.actor | dict(optimizer="muon")), path)
    batch = build_batch(actor.model, case)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    norms = [take_step(actor, batch, ALGORITHM)["policy/grad_norm"] for _ in range(UPDATES)]
    held = sum(x.numel() for adam in actor.optimizer.adams for s in adam.state.values() for x in s.values() if x.dim())
    return norms, list_pieces(actor.model), held


SP = dict(sequence_parallel=True)
PLAIN = dict(zero_stage=0)
CASES = {
    "tp1": ("qwen2", Case()),
    "dp2": ("qwen2", Case(2)),
    "dp3": ("qwen2", Case(3)),
    "dp2-replicated": ("qwen2", Case(2, actor=PLAIN)),
    "tp2": ("qwen2", Case(2, dict(tp_size=2))),
    "tp2-dp2-sp": ("qwen2", Case(4, dict(tp_size=2), SP)),
    "pp2-cp2": ("qwen2", Case(4, dict(pp_size=2, cp_size=2))),
    "moe": ("qwen3_moe", Case()),
    "moe-ep2-dp2": ("qwen3_moe", Case(2, dict(ep_size=2))),
    "moe-ep2-tp2-sp": ("qwen3_moe", Case(4, dict(tp_size=2, ep_size=2), SP)),
}


COVERED = {"dp2", "tp2", "moe", "moe-ep2-dp2"}  # by the cases that combine their layouts with another


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in COVERED)) for name in CASES])
def test_equals_a_plain_loop_in_every_layout(name: str, paths: dict[str, Path]) -> None:
    """Weights after three updates; a step moves an element of a matrix by about 2e-4."""
    family, case = CASES[name]
    found = run_ranks(_train, case.world_size, paths[family], case, timeout=100)
    norms, expected = train_with_transformers(paths[family])
    assert all(norm == found[0][0] for norm, _, _ in found)
    assert found[0][0] == pytest.approx(norms, rel=2e-5)
    weights = merge_weights([pieces for _, pieces, _ in found], paths[family])
    before = AutoModelForCausalLM.from_pretrained(paths[family], dtype=torch.float32).state_dict()
    for tensor, values in expected.items():
        assert (weights[tensor] - values).abs().max() < 5e-6, tensor
        if tensor in before:
            assert (values - before[tensor]).abs().max() > 1e-4, tensor


def test_a_matrix_has_one_state(paths: dict[str, Path]) -> None:
    """Adam's two states for the others; ranks of ZeRO-1 have them once between them."""
    shapes = load_model_shape(paths["qwen2"]).logical_tensors()
    sizes = {
        name: math.prod(size) * (1 if len(size) == 2 and ".layers." in name else 2) for name, size in shapes.items()
    }
    padding = padded_vocab_size(VOCAB_SIZE, 1) - VOCAB_SIZE
    sizes["padding of the embedding"] = 2 * padding * shapes["model.embed_tokens.weight"][1]
    for case in (Case(), Case(2)):
        found = run_ranks(_train, case.world_size, paths["qwen2"], case, timeout=60)
        assert sum(held for _, _, held in found) == sum(sizes.values())
