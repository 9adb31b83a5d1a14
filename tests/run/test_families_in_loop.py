# SPDX-License-Identifier: Apache-2.0
"""Two steps of the whole GRPO program on a tiny model of every family: engine and trainer are one policy.

Log-probs of sampled tokens differ by rounding at both steps, so weights also arrive after an update. Ranks are forked
(tests/launch runs the same program under torchrun). Not covered: real checkpoints, bfloat16, learning.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from distributed import run_ranks
from megatron_rl.weights.family import FAMILIES
from megatron_rl.weights.model_config import TEXT_PARTS
from rl_runs import layout_overrides, overrides_for, read_records, train
from tiny_models import engine_sizes, save_tiny_model

EP2 = "actor.expert_model_parallel_size=2"
CASES: dict[str, tuple[int, str, list[str]]] = {  # ranks, engine, layout
    "llama": (2, "vllm", layout_overrides(1, 2, 1)),
    "qwen2": (2, "vllm", layout_overrides(2, 1, 1)),
    "qwen3": (2, "vllm", layout_overrides(2, 1, 2)),
    "mistral": (2, "vllm", layout_overrides(1, 2, 2)),
    "gemma": (2, "vllm", layout_overrides(2, 1, 1)),
    "gemma3_text": (4, "vllm", layout_overrides(2, 2, 1)),
    "gemma4_text": (4, "vllm", layout_overrides(2, 2, 1)),
    "phi3": (4, "vllm", layout_overrides(2, 2, 2)),
    "glm4": (4, "vllm", layout_overrides(2, 2, 1)),
    "smollm3": (2, "hf", layout_overrides(2, 1, 1)),  # vLLM has no implementation of its own
    "olmo2": (4, "hf", layout_overrides(2, 2, 1)),  # likewise
    "qwen3_moe": (2, "vllm", [EP2]),
    "qwen3_next": (2, "hf", [EP2]),  # vLLM computes delta nets in bfloat16 only on a CPU
    "qwen3_5_text": (4, "hf", layout_overrides(2, 2, 1)),
    "qwen3_5_moe_text": (2, "hf", [EP2]),
    "qwen3_5_moe": (2, "hf", [EP2]),  # the text part of an image-text model
    "mixtral": (4, "vllm", [*layout_overrides(2, 1, 2), EP2]),
    "glm4_moe": (2, "vllm", [EP2]),
    "deepseek_v3": (2, "vllm", [EP2]),
    "glm4_moe_lite": (2, "vllm", [EP2]),
    "minimax_m2": (4, "vllm", [*layout_overrides(2, 1, 2), EP2]),
    "gpt_oss": (4, "vllm", [*layout_overrides(2, 1, 2), EP2]),
    "gpt_oss+hf": (4, "hf", layout_overrides(2, 2, 1)),
    "gpt_oss+megatron": (2, "megatron", [EP2]),
    "gemma4": (2, "hf", layout_overrides(2, 1, 1)),  # the text part of an image-text model
    "gemma4_text+megatron": (2, "megatron", layout_overrides(2, 1, 1)),
}


def check_family(case: str, task: Path, directory: Path) -> None:
    """Train two steps; the largest gap of a log-prob is at most 1e-4 at both."""
    family, (world_size, engine, layout) = case.partition("+")[0], CASES[case]
    vocab_size = json.loads((task / "model/config.json").read_text())["vocab_size"]
    save_tiny_model(directory / "model", family, **engine_sizes(family) | dict(vocab_size=vocab_size))
    shutil.copy(task / "tokenizer.model", directory / "model")
    extra = [f"model.path={directory}/model", f"rollout.engine={engine}", "data.validation_files=[]"]
    overrides = overrides_for(task, directory / "run", *layout, *extra)
    assert run_ranks(train, world_size, overrides, timeout=170) == [None] * world_size
    if family in TEXT_PARTS:
        assert "its text part is used" in (directory / "run/logs/rank0.log").read_text()
    records = read_records(directory / "run")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert 0 < record["mismatch/max"] < 1e-4 and record["policy/grad_norm"] > 0


def test_router_biases_train_on_two_expert_parallel_ranks(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """GLM-4.5, of which a cheap run is in the default tier."""
    check_family("glm4_moe", task, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted((FAMILIES.keys() | CASES.keys()) - {"glm4_moe"}))
def test_engine_and_trainer_are_one_policy(case: str, task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """A family without a case here is an error."""
    check_family(case, task, tmp_path)
