# SPDX-License-Identifier: Apache-2.0
"""TRL's side of bench_real.py: an unchanged GRPOTrainer with the settings of our recipe, which writes metrics.jsonl.

PYTHONPATH=DIRECTORY_OF_TRL python tools/benchmarks/_trl_real.py DIR STEPS MICRO_BATCH SEED
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from megatron_rl.config.schema import RunConfig
from megatron_rl.observability.metrics import METRICS_FILE
from megatron_rl.rewards.scoring import score_math
from megatron_rl.run.loading import load_config
from tools.benchmarks.bench_real import ACCURACY, RECIPE, ROOT, TEST_FREQ

_ROWS = 32  # validation prompts in one call


def read_rows(file: str) -> list[dict[str, Any]]:
    """Read a file of the task."""
    return [json.loads(line) for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]


def score(text: str, truth: str) -> float:
    """Return the recipe's reward."""
    return score_math(text, truth, answer="any")["score"]


class Recorder(TrainerCallback):
    """Scores completions and writes a line of metrics.jsonl per step, with greedy validation if due."""

    def __init__(self, directory: Path, model: Any, tokenizer: Any, rows: list[dict[str, Any]], length: int) -> None:
        self._file, self._model, self._tokenizer = directory / METRICS_FILE, model, tokenizer
        self._rows, self._length, self._rewards = rows, length, list[float]()

    def reward(self, completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        """Score completions of a step."""
        scores = [score(done[0]["content"], truth) for done, truth in zip(completions, answer, strict=True)]
        self._rewards += scores
        return scores

    @torch.no_grad()
    def validate(self) -> float:
        """Return the share of validation prompts that the model answers rightly, greedily."""
        self._model.eval()
        right = 0.0
        for rows in (self._rows[i : i + _ROWS] for i in range(0, len(self._rows), _ROWS)):
            inputs = self._tokenizer.apply_chat_template(
                [row["prompt"] for row in rows],
                add_generation_prompt=True,
                padding=True,
                return_tensors="pt",
                return_dict=True,
            )
            found = self._model.generate(**inputs, max_new_tokens=self._length, do_sample=False)
            texts = self._tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            right += sum(score(text, row["answer"]) for text, row in zip(texts, rows, strict=True))
        self._model.train()
        return right / len(self._rows)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Validate before the first step."""
        self._start = time.monotonic()
        self._write(0, {ACCURACY: self.validate()})

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock of a step."""
        self._start = time.monotonic()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Write the record of a step."""
        values = {"reward/mean": sum(self._rewards) / len(self._rewards)}
        self._rewards.clear()
        if state.global_step % TEST_FREQ == 0:
            start = time.monotonic()
            values |= {ACCURACY: self.validate(), "time/validation": time.monotonic() - start}
        self._write(state.global_step, values)

    def _write(self, step: int, values: dict[str, float]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values, "time/step": time.monotonic() - self._start}) + "\n")


def build_arguments(config: RunConfig, directory: Path, steps: int, micro_batch: int, seed: int) -> Any:
    """Return TRL's settings for our recipe."""
    from trl import GRPOConfig

    actor = config.actor
    return GRPOConfig(
        output_dir=str(directory / "trainer"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=config.data.train_batch_size * config.rollout.n // micro_batch,
        num_generations=config.rollout.n,
        max_completion_length=config.data.max_response_length,
        temperature=config.rollout.temperature,
        top_k=0,
        beta=0.0,
        loss_type="dapo",  # the mean over tokens
        max_steps=steps,
        seed=seed,
        learning_rate=actor.lr,
        lr_scheduler_type="linear",
        warmup_steps=actor.lr_warmup_steps,
        adam_beta1=actor.adam_beta1,
        adam_beta2=actor.adam_beta2,
        weight_decay=actor.weight_decay,
        max_grad_norm=actor.clip_grad,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        fp16=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def train(directory: Path, steps: int, micro_batch: int, seed: int) -> None:
    """Train with TRL."""
    from trl import GRPOTrainer

    config = load_config(RECIPE, []).config
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    directory.mkdir(parents=True)
    validation = read_rows(config.data.validation_files[0])
    recorder = Recorder(directory, model, tokenizer, validation, config.data.max_response_length)
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in read_rows(config.data.train_files[0])]
    GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=recorder.reward,
        train_dataset=Dataset.from_list(rows),
        callbacks=[recorder],
        args=build_arguments(config, directory, steps, micro_batch, seed),
    ).train()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
