# SPDX-License-Identifier: Apache-2.0
"""Gradients of Qwen3-Next and Qwen3.5 equal transformers', tensor by tensor, on every supported layout.

They come from an update with clipping, KL and entropy bonus, before the weights move. Not covered: the weight update
(tests/training/test_actor.py), CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from role_setups import take_step
from transformers import AutoModelForCausalLM

from actor_runs import (
    ALGORITHM,
    Case,
    build_actor,
    build_batch,
    list_gradients,
    merge_weights,
    train_with_transformers,
)
from distributed import run_ranks
from megatron_rl.run.inputs import read_rl_inputs
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError
from megatron_rl.weights.model_config import load_model_shape
from megatron_rl.weights.packed_experts import split_huggingface_experts
from rl_runs import overrides_for
from tiny_models import save_tiny_model

ALWAYS: dict[str, Any] = dict(zero_stage=0)
SP = dict(sequence_parallel=True)
LAYOUTS = {
    "single": Case(),
    "tp2-sp": Case(2, dict(tp_size=2), SP),
    "pp2": Case(2, dict(pp_size=2)),
    "ep2": Case(2, dict(ep_size=2)),
    "cp2-tp2-sp": Case(4, dict(cp_size=2, tp_size=2), SP),
    "selective": Case(actor=dict(recompute_granularity="selective")),
    "full": Case(actor=dict(recompute_granularity="full")),
}


FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
CASES = [(family, layout) for family in FAMILIES for layout in LAYOUTS if (family, layout) != ("qwen3_5_text", "ep2")]


@dataclass(frozen=True)
class Reference:
    """A model, and its gradients by transformers, clipped to a norm of 0.5."""

    path: Path
    gradients: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    found = {}
    for family in FAMILIES:
        path = tmp_path_factory.mktemp(family)
        save_tiny_model(path, family)
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        train_with_transformers(model, num_updates=1)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found[family] = Reference(path, split_huggingface_experts(load_model_shape(path), gradients))
    return found


@pytest.fixture
def path(references: dict[str, Reference]) -> Path:
    return references["qwen3_next"].path


def _collect(rank: int, world_size: int, case: Case, path: Path) -> list[Any]:
    actor = build_actor(case, path)
    batch = build_batch(actor.model, case)
    take_step(actor, replace(batch, old_logprobs=actor.compute_logprobs(batch)), ALGORITHM)
    return list_gradients(actor.model)


# Another family is trained in the same layout, or a layout that has the same beside another, in the default tier.
SLOW = {("qwen3_5_moe_text", "cp2-tp2-sp"), ("qwen3_next", "tp2-sp"), ("qwen3_5_text", "tp2-sp"), ("qwen3_next", "ep2")}


@pytest.mark.parametrize(
    ("family", "layout"), [pytest.param(*case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
)
def test_gradients_equal_transformers(family: str, layout: str, references: dict[str, Reference]) -> None:
    """Relative to the largest of each tensor. Decays are exponentials of sums in float32: 2e-5 was seen."""
    case, path, expected = LAYOUTS[layout], references[family].path, references[family].gradients
    ranks = run_ranks(_collect, case.world_size, replace(case, actor=ALWAYS | case.actor), path, timeout=100)
    found = merge_weights(ranks, path)
    assert found.keys() == expected.keys()
    gaps = {name: ((found[name] - x).abs().max() / x.abs().max()).item() for name, x in expected.items()}
    wrong = {name: gap for name, gap in gaps.items() if gap > (5e-5 if name.endswith(("A_log", "dt_bias")) else 1e-5)}
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("actor.zero_stage=3", "actor.zero_stage = 3 with a qwen3_next model"),
        ("actor.step_mode=graph", "actor.step_mode = graph with a qwen3_next model"),
        ("rollout.engine=megatron", "its cache holds keys and values, no states"),
        ("actor.context_parallel_size=8", "context_parallel_size"),
        ("actor.tensor_model_parallel_size=8 actor.sequence_parallel=true", "does not divide the 4"),
    ],
)
def test_what_is_not_served_is_refused(override: str, found: str, task: Path, path: Path) -> None:
    """Before anything is built. vLLM on a CPU: in tests/engines/test_vllm_engine.py."""
    overrides = [
        f"model.path={path}",
        f"model.tokenizer={task}/model",
        "rollout.engine=hf",
        "data.validation_files=[]",
        *override.split(),
    ]
    config = load_config(None, overrides_for(task, path / "run", *overrides)).config
    with pytest.raises(UserError, match=found):
        read_rl_inputs(config, 8)
