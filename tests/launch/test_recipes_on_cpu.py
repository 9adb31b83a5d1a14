# SPDX-License-Identifier: Apache-2.0
"""Every GPU recipe trains two steps on CPU unchanged but for `model.dtype=float32` and a small model of its family.

The recipes run in a directory with their inputs: the model, with a BPE tokenizer and a chat template, and the parquet
files that tools/prepare_prompts.py makes. `shrink` makes all changes. Ranks are forked. Not covered: learning, lengths
and layouts of the recipes, and that the models fit into the GPUs (tests/planning).
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
import yaml

import megatron_rl.run.grpo as trainer_module
from distributed import run_ranks
from megatron_rl.run.loading import load_config
from rl_runs import leave_out_curves, read_log
from tiny_models import engine_sizes, save_tiny_model
from tools import prepare_prompts

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {  # recipe -> family of its model
    "deepseek_v3_math": "deepseek_v3",
    "glm4.5_air_math": "glm4_moe",
    "llama3.1_8b_gsm8k": "llama",
    "llama3.1_8b_qlora": "llama",
    "qwen2.5_0.5b_gsm8k": "qwen2",
    "qwen2.5_72b_lora": "qwen2",
    "qwen2.5_72b_math": "qwen2",
    "qwen2.5_7b_distill": "qwen2",
    "qwen2.5_7b_gsm8k": "qwen2",
    "qwen2.5_7b_search": "qwen2",
    "qwen3_30b_a3b_math": "qwen3_moe",
    "qwen3_30b_a3b_zero3": "qwen3_moe",
    "qwen3_32b_math": "qwen3",
    "qwen3_8b_long": "qwen3",
    "qwen3_8b_math": "qwen3",
}
# Each differs from one of the others in sizes, offloading and layout alone, or has a family or agents of other tests.
ALIKE = {"qwen2.5_72b_math", "qwen2.5_7b_gsm8k", "qwen3_30b_a3b_math"}
ALIKE |= {"glm4.5_air_math", "llama3.1_8b_gsm8k", "qwen3_8b_math", "qwen3_8b_long", "qwen2.5_7b_search"}
ALIKE |= {"qwen3_32b_math"}
WITH_PACKAGES = {"qwen2.5_0.5b_reasoning_gym"}  # need packages that are not installed here
ENDS = [2, *range(0, 500, 5)]  # the tokenizer's EOS, and enough others that responses end in them
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}" + START + "{{ m['role'] }}\n{{ m['content'] }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)


def shrink(recipe: dict[str, Any]) -> tuple[int, list[str]]:
    """The fewest ranks on which its layout shows, and settings for the recipe: type, batch, length, layout, workers."""
    sections = {name: recipe.get(name, {}) for name in ("actor", "critic", "rollout")}
    sections |= {f"teachers.{name}": section for name, section in recipe.get("teachers", {}).items()}
    layout = {
        f"{section}.{name}_parallel_size": min(2, size) if name != "pipeline_model" else 1
        for section in sections
        for name in ("tensor_model", "pipeline_model", "context", "expert_model")
        if (size := sections[section].get(f"{name}_parallel_size"))
    }
    if "expert_parallel_size" in recipe["rollout"]:
        parts = min(2, recipe["rollout"].get("data_parallel_size", 1))
        width = parts * layout.get("rollout.tensor_model_parallel_size", 1)
        layout |= {"rollout.data_parallel_size": parts, "rollout.expert_parallel_size": width}
    sizes = [layout.get(f"actor.{name}_parallel_size", 1) for name in ("tensor_model", "context", "expert_model")]
    overrides = [
        "model.dtype=float32",
        "data.train_batch_size=4",
        "actor.ppo_mini_batch_size=2",
        "data.max_response_length=8",
        "trainer.total_steps=2",
        *(f"{k}={v}" for k, v in layout.items()),
        *(["reward.overlong_buffer_length=4"] if "overlong_buffer_length" in recipe["reward"] else []),
        *(["rollout.engine_options={}"] if "engine_options" in recipe["rollout"] else []),  # DeepEP needs GPUs
        *(["actor.step_mode=static"] if "step_mode" in recipe["actor"] else []),  # graph without capture
    ]
    return math.prod(sizes), overrides


def make_model(directory: Path, family: str, corpus: list[str]) -> None:
    """A random model whose generation config lists more ends of a response than the tokenizer."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(
        corpus,
        tokenizers.trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=[PAD, START, END],
            show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    model = save_tiny_model(
        directory,
        family,
        **engine_sizes(family),
        num_hidden_layers=2,
        max_position_embeddings=2048,
        **({"moe_intermediate_size": 64} if family == "qwen3_moe" else {}),
    )
    model.generation_config.update(eos_token_id=ENDS)
    model.generation_config.save_pretrained(directory)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/ and models/ as the recipes name them."""
    place = tmp_path_factory.mktemp("place")
    corpus = []
    for dataset, (question, answer) in {"gsm8k": ("question", "answer"), "math": ("problem", "solution")}.items():
        rows = [
            {question: f"Ann has {n} apples and buys {n + 2}. How many?", answer: f"{n} + {n + 2}\n#### {2 * n + 2}"}
            for n in range(12)
        ]
        corpus += [row[question] + row[answer] for row in rows]
        (place / dataset).mkdir()
        for split, part in (("train", rows[:8]), ("test", rows[8:])):
            (place / dataset / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        assert (
            prepare_prompts.main(
                ["--dataset", dataset, "--input", str(place / dataset), "--out", str(place / "data" / dataset)]
            )
            == 0
        )
    (place / "data/search").mkdir()
    question = {"prompt": [{"role": "user", "content": "How many?"}], "answer": "12"}
    for name in ("train", "test"):
        (place / f"data/search/{name}.jsonl").write_text((json.dumps(question) + "\n") * 8)
    (place / "data/search/corpus.jsonl").write_text('{"text": "Ann buys apples."}')
    for name, family in RECIPES.items():
        recipe = yaml.safe_load((ROOT / f"launch/recipes/{name}.yaml").read_text())
        for section in (recipe["model"], *recipe.get("teachers", {}).values()):
            make_model(place / section["path"], family, corpus)
    return place


def train(rank: int, world_size: int, place: Path, recipe: Path, overrides: list[str]) -> list[str]:
    """One rank, as the entry point runs it; returns the notes."""
    os.chdir(place)
    leave_out_curves()
    loaded = load_config(recipe, [*overrides, f"trainer.run_dir={recipe.stem}"])
    trainer_module.Trainer.from_config(loaded.config, recipe).train()
    return loaded.notes


def test_all_gpu_recipes_are_here() -> None:
    recipes = {path.stem for path in (ROOT / "launch/recipes").glob("*.yaml")}
    assert {name for name in recipes if not name.startswith(("toy_", "smollm2_"))} == RECIPES.keys() | WITH_PACKAGES


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in RECIPES]
)
def test_two_steps(place: Path, vllm_imported: None, name: str) -> None:
    """Settings without effect on CPU are noted; a response ends with any stop token of the model."""
    path = ROOT / f"launch/recipes/{name}.yaml"
    recipe = yaml.safe_load(path.read_text())
    world_size, overrides = shrink(recipe)
    notes = run_ranks(train, world_size, place, path, overrides, timeout=150)[0]
    assert notes == []
    records = [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    assert "validation/test/accuracy" in records[2]
    log = read_log(place / name)
    assert "no effect on CPU: rollout.enforce_eager=false" in log and "stop tokens: 2, 0, 5, 10" in log
    rows = [json.loads(line) for line in (place / name / "rollouts/step_1.jsonl").read_text().splitlines()]
    assert "stop" in {row["finish_reason"] for row in rows}
    for row in rows:
        assert not set(row["tokens"][:-1]) & set(ENDS)
        assert (row["tokens"][-1] in ENDS) == (row["finish_reason"] == "stop")
