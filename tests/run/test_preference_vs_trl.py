# SPDX-License-Identifier: Apache-2.0
"""Preference learning against TRL's trainers: the same model, rows and optimizer; losses, gradients and weights.

All three are of three updates. Gradients are compared as the optimizer gets them, clipped from norms of 1.7 to 27 to
a norm of 1, so the norms before clipping are compared, too.

Adam's epsilon is 1e-3 on both sides. With 1e-8 a weight whose gradient is rounding alone moves by a full step, and
TRL's weights with eager attention differ by up to 3e-6 from its own with sdpa, as far as these do; with 1e-4 by 4e-7.

Skipped without TRL (compared with 1.16.0). Not covered: TRL's orpo adds the likelihood of the prompt's tokens, so its
prompts have one token here; simpo is TRL's cpo trainer without its likelihood term.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import write_chat_tokenizer
from preference_runs import read_weights, train_on_rank
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

import megatron_rl.run.preference as preference_module
from actor_runs import Piece, list_gradients, merge_weights
from distributed import run_ranks
from rl_runs import read_records
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
        ["preference.beta=0.2", "preference.kto_weights=[1.5, 1.0]"],
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


def _train(rank: int, world_size: int, overrides: Sequence[str]) -> list[list[Piece]]:
    """Return the gradients of each update."""
    found: list[list[Piece]] = []

    class Watched(preference_module.PreferenceTrainer):
        def update(self, examples: Any) -> Any:
            samples = super().update(examples)
            found.append(list_gradients(self.actor.model))
            return samples

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preference_module, "PreferenceTrainer", Watched)
        train_on_rank(rank, world_size, overrides)
    return found


class _Watcher(TrainerCallback):
    """Transformers calls it after clipping."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        named = model.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})


def _train_with_trl(
    loss: str, model_dir: Path, output: Path
) -> tuple[list[dict[str, float]], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return the log and the gradients of each update, and the last weights."""
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
    trainer.add_callback(watcher := _Watcher())
    trainer.train()
    log = [row for row in trainer.state.log_history if "loss" in row]
    return log, watcher.gradients, {key: value.detach() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("loss", CASES)
def test_losses_gradients_and_weights_are_those_of_trl(loss: str, tmp_path: Path) -> None:
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
    (gradients,) = run_ranks(_train, 1, overrides, timeout=200)
    log, expected, weights = _train_with_trl(loss, model, tmp_path / "trl")
    records = [record for record in read_records(tmp_path / "run") if record["step"]]
    for mine, theirs in (("preference/loss", "loss"), ("policy/grad_norm", "grad_norm")):
        assert [x[mine] for x in records] == pytest.approx([x[theirs] for x in log], rel=2e-6, abs=1e-6)
    head = "score" if loss == "bradley_terry" else "lm"
    for pieces, theirs in zip(gradients, expected, strict=True):
        mine = merge_weights([pieces], model, head)
        assert mine.keys() == theirs.keys()
        gaps = {name: float((mine[name] - x).abs().max()) for name, x in theirs.items()}
        assert max(gaps.values()) < 1e-6, gaps  # seen: 1.7e-7
        assert min(float(x.abs().max()) for x in theirs.values()) > 1e-4, "so that no tensor is equal by being zero"
    found, start = read_weights(tmp_path), load_file(model / "model.safetensors")
    moved = torch.cat([(found[name] - start[name]).abs().flatten() for name in start])
    assert moved.mean() > 3e-4, "of at most 3e-3"
    assert max(float((found[name] - weights[name]).abs().max()) for name in found) < 1e-6
