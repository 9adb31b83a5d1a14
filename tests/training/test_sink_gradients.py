# SPDX-License-Identifier: Apache-2.0
"""Gradients of gpt-oss equal transformers' in every layout: sinks, windows, biases, packed experts.

The likelihood of eight rollouts is differentiated on a layout, and in transformers sequence by sequence. Not covered:
the optimizer (tests/training/test_actor.py), replayed routes, recomputation of whole layers, GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from role_setups import take_step

from actor_runs import (
    NUM_PROMPT_TOKENS,
    WEIGHTS,
    Case,
    build_actor,
    build_batch,
    list_gradients,
    merge_weights,
    score_with_transformers,
)
from distributed import run_ranks
from megatron_rl.training.given_losses import sft
from megatron_rl.weights.model_config import load_model_shape
from megatron_rl.weights.packed_experts import split_huggingface_experts
from tiny_models import save_tiny_model

SP: dict[str, Any] = dict(sequence_parallel=True)
# Every rank has the whole gradient of its parameters, also after the step, which sums it over the ranks.
REPLICATED: dict[str, Any] = dict(zero_stage=0, clip_grad=1e9)
LAYOUTS = {
    "single": Case(),
    "tp2-sp": Case(2, dict(tp_size=2), SP),
    "pp2": Case(2, dict(pp_size=2)),
    "ep2": Case(2, dict(ep_size=2)),
    "cp2": Case(2, dict(cp_size=2)),
    "cp4-selective": Case(4, dict(cp_size=4), dict(recompute_granularity="selective")),
    "etp1-tp2-sp": Case(2, dict(etp_size=1, tp_size=2), SP),
    "ep2-tp2-sp": Case(4, dict(ep_size=2, tp_size=2), SP),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model, and the gradients of its logical tensors."""
    path = tmp_path_factory.mktemp("gpt_oss")
    reference = save_tiny_model(path, "gpt_oss")
    with torch.no_grad():  # sinks that matter, and gates and ups that are clamped
        for name, parameter in reference.named_parameters():
            if name.endswith(".sinks"):
                parameter.add_(torch.linspace(0.0, 3.0, len(parameter)))
            elif name.endswith("gate_up_proj"):
                parameter.mul_(4.0)
    reference.save_pretrained(path)
    scores = score_with_transformers(reference)
    loss = -sum(w * x[NUM_PROMPT_TOKENS - 1 :].sum() for w, (x, _) in zip(WEIGHTS, scores, strict=True))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    grads = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    return path, split_huggingface_experts(load_model_shape(path), grads)


def _measure(rank: int, world_size: int, case: Case, path: Path) -> Any:
    actor = build_actor(case, path)
    take_step(actor, build_batch(actor.model, case), sft)
    return list_gradients(actor.model)


COVERED = {"tp2-sp", "ep2", "cp2"}  # by the layouts that combine them with another


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.slow] * (layout in COVERED)) for layout in LAYOUTS]
)
def test_gradients_equal_transformers(layout: str, model: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, expected = model
    case = LAYOUTS[layout]
    case = Case(case.world_size, case.sizes, REPLICATED | case.actor)
    found = merge_weights(run_ranks(_measure, case.world_size, case, path, timeout=100), path)
    assert found.keys() == expected.keys()
    largest = max(x.abs().max().item() for x in expected.values())
    gaps = {name: (found[name] - x).abs().max().item() for name, x in expected.items()}
    assert max(gaps.values()) <= 1e-5, (largest, {k: v for k, v in gaps.items() if v > 1e-5})
    for name, gradient in expected.items():  # of tokens that were not there, and of experts without one
        assert gradient.any() or ".experts." in name, name
