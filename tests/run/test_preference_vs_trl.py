# SPDX-License-Identifier: Apache-2.0
"""Preference learning against TRL's trainers: the same model, rows and optimizer; losses and weights of three updates.

Adam's epsilon is 1e-3 on both sides. With 1e-8 a weight whose gradient is rounding alone moves by a full step, and
TRL's weights with eager attention differ by up to 3e-6 from its own with sdpa, as far as these do; with 1e-4 by 4e-7.

Skipped without TRL (compared with 1.16.0). Not covered: TRL's orpo adds the likelihood of the prompt's tokens, so its
prompts have one token here; simpo is TRL's cpo trainer without its likelihood term.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import write_chat_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from distributed import run_ranks
from megatron_rl.run.loading import load_config
from megatron_rl.run.preference import train_preferences
from rl_runs import leave_out_curves, read_records
from tiny_models import save_tiny_model

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

ADAM_EPS = 1e-3
WORDS = ["one", "two", "three", "four", "five", "six"]
PAIRS = [
    {"prompt": f"{word}:", "chosen": f" {i} {word} {i}" * (i + 1), "rejected": f" {7 - i}" * (6 - i)}
    for i, word in enumerate(WORDS)
]
SHORT = [{**row, "prompt": word[0]} for word, row in zip(WORDS, PAIRS, strict=True)]
SINGLES = [
    {"prompt": row["prompt"], "completion": row["chosen" if i % 3 else "rejected"], "label": bool(i % 3)}
    for i, row in enumerate(PAIRS)
]
# loss -> rows, TRL's module, its trainer and config, TRL's settings, our settings
CASES: dict[str, tuple[list[dict[str, Any]], str, str, dict[str, Any], list[str]]] = {
    "dpo": (PAIRS, "trl", "DPO", {"beta": 0.2}, ["preference.beta=0.2"]),
    "ipo": (PAIRS, "trl", "DPO", {"beta": 0.2, "loss_type": "ipo"}, ["preference.beta=0.2"]),
    "robust": (
        PAIRS,
        "trl",
        "DPO",
        {"beta": 0.2, "loss_type": "robust", "label_smoothing": 0.1},
        ["preference.beta=0.2", "preference.label_smoothing=0.1"],
    ),
    "kto": (
        SINGLES,
        "trl",
        "KTO",
        {"beta": 0.2, "desirable_weight": 1.5},
        ["preference.beta=0.2", "preference.desirable_weight=1.5"],
    ),
    "orpo": (SHORT, "trl.experimental.orpo", "ORPO", {"beta": 0.2}, ["preference.beta=0.2"]),
    "simpo": (
        PAIRS,
        "trl.experimental.cpo",
        "CPO",
        {"beta": 2.0, "loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.4},
        ["preference.beta=2.0", "preference.simpo_gamma=0.4"],
    ),
    "bradley_terry": (
        [{**row, "margin": 0.1 * i} for i, row in enumerate(PAIRS)],
        "trl",
        "Reward",
        {"center_rewards_coefficient": 0.01},
        ["preference.center_coef=0.01"],
    ),
}


def _train(rank: int, world_size: int, overrides: Sequence[str]) -> None:
    leave_out_curves()
    os.environ["WORLD_SIZE"] = str(world_size)
    train_preferences(load_config(None, overrides).config, None)


def _train_with_trl(loss: str, model_dir: Path, output: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    from datasets import Dataset

    rows, module, name, settings, _ = CASES[loss]
    library = importlib.import_module(module)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.bos_token = None  # ORPO and CPO would put it before prompts
    kind = AutoModelForSequenceClassification if loss == "bradley_terry" else AutoModelForCausalLM
    model = kind.from_pretrained(model_dir, dtype=torch.float32)
    rows = [dict(row) for row in rows]
    if loss == "bradley_terry":
        model.config.pad_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    config = getattr(library, f"{name}Config")(
        output_dir=str(output),
        per_device_train_batch_size=len(rows),
        max_steps=3,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta2=0.95,
        adam_epsilon=ADAM_EPS,
        max_grad_norm=1.0,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        gradient_checkpointing=False,
        bf16=False,
        **({"max_length": 64} if name in ("ORPO", "CPO") else {}),
        **settings,
    )
    trainer = getattr(library, f"{name}Trainer")(
        model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, {key: value.detach() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("loss", CASES)
def test_losses_and_weights_are_those_of_trl(loss: str, tmp_path: Path) -> None:
    model, rows, extra = tmp_path / "model", CASES[loss][0], CASES[loss][-1]
    save_tiny_model(model, "qwen2", vocab_size=512, num_hidden_layers=2)
    write_chat_tokenizer(model, "qwen2.5")
    if loss == "bradley_terry":
        torch.manual_seed(0)
        kind = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
        kind.config.pad_token_id = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|endoftext|>")
        kind.save_pretrained(model)
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        *(f"model.path={model}", "model.dtype=float32", f"data.train_files=[{file}]", "data.shuffle=false"),
        *(f"data.train_batch_size={len(rows)}", "data.max_prompt_length=32", "data.max_response_length=64"),
        *("actor.lr=1e-3", f"actor.adam_eps={ADAM_EPS}", "actor.weight_decay=0"),
        *("actor.max_tokens_per_microbatch=200", "trainer.total_steps=3"),
        *(f"trainer.run_dir={tmp_path}/run", f"preference.loss={loss}", *extra),
    ]
    run_ranks(_train, 1, overrides, timeout=200)
    losses, weights = _train_with_trl(loss, model, tmp_path / "trl")
    ours = [record["preference/loss"] for record in read_records(tmp_path / "run") if record["step"]]
    assert ours == pytest.approx(losses, rel=2e-6, abs=1e-6)
    (directory,) = (tmp_path / "run" / "checkpoints").glob("step_3/huggingface")
    found, start = load_file(directory / "model.safetensors"), load_file(model / "model.safetensors")
    moved = torch.cat([(found[name] - start[name]).abs().flatten() for name in start])
    assert moved.mean() > 3e-4, "of at most 3e-3"
    assert max(float((found[name] - weights[name]).abs().max()) for name in found) < 1e-6
