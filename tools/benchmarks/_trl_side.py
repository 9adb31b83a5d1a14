# SPDX-License-Identifier: Apache-2.0
"""TRL's side of bench_step_vs_trl.py: an unchanged GRPOTrainer with scripted responses and timers.

The driver starts it with the Python that has TRL. In the workload "rollouts", TRL samples with transformers, and a
function of the text computes the reward.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tools.benchmarks._step_contest import (
    KL_COEF,
    LEARNING_RATE,
    MODEL,
    NUM_UPDATES,
    SMALL_LEARNING_RATE,
    WORDS,
    WORKLOADS,
    add_worker_options,
    answer,
    draw_prompts,
    draw_workload,
    read_clock,
    score_text,
    wait_for_step,
)


class ScriptedTrainer(GRPOTrainer):
    """A GRPOTrainer with scripted responses and timed parts."""

    def __init__(self, options: argparse.Namespace, **settings: Any) -> None:
        super().__init__(rollout_func=_roll_out, reward_funcs=self._look_up_rewards, **settings)
        self.options, self.contest_step, self.update_seconds = options, 0, []
        self.seconds = dict.fromkeys(("prepare", "logprobs", "reference"), 0.0)
        self.logprob_sums: list[float] = []
        self.add_callback(_Clock(self))

    def _look_up_rewards(self, **_: Any) -> list[float]:
        return self.work.draw_rewards().tolist()

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        start = read_clock()
        inputs = super()._prepare_inputs(generation_batch)
        self.seconds["prepare"] += read_clock() - start
        return inputs

    def _get_per_token_logps_and_entropies(self, model: Any, input_ids: torch.Tensor, *rest: Any, **named: Any) -> Any:
        start = read_clock()
        found = super()._get_per_token_logps_and_entropies(model, input_ids, *rest, **named)
        if model is self.ref_model:
            self.seconds["reference"] += read_clock() - start
        elif not torch.is_grad_enabled():
            self.seconds["logprobs"] += read_clock() - start
            lengths = [len(response) for _, response in self.pairs]
            self.logprob_sums = [float(row[:n].double().sum()) for row, n in zip(found[0], lengths, strict=True)]
            self.tokens_computed = input_ids.numel()
        return found


def _roll_out(prompts: list[str], trainer: ScriptedTrainer) -> dict[str, Any]:
    if trainer.contest_step == 0:
        answer({"ready": True})
    wait_for_step()
    trainer.work = draw_workload(trainer.options, trainer.contest_step)
    trainer.pairs = trainer.work.draw_tokens(MODEL["vocab_size"])
    return {
        "prompt_ids": [prompt.tolist() for prompt, _ in trainer.pairs],
        "completion_ids": [response.tolist() for _, response in trainer.pairs],
        "logprobs": None,
    }


class _Clock(TrainerCallback):
    """Times updates without preparation, and answers the driver after a step."""

    def __init__(self, trainer: ScriptedTrainer) -> None:
        self._trainer = trainer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start, self._trainer.seconds["prepare"] = read_clock(), 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        trainer = self._trainer
        trainer.update_seconds.append(read_clock() - self._start - trainer.seconds["prepare"])
        if len(trainer.update_seconds) == NUM_UPDATES:
            answer(
                {
                    "logprobs": trainer.seconds["logprobs"],
                    "reference": trainer.seconds["reference"],
                    "update": (sum if trainer.ref_model else statistics.mean)(trainer.update_seconds),
                    "logprob_sums": trainer.logprob_sums,
                    "tokens_computed": trainer.tokens_computed,
                }
            )
            trainer.contest_step += 1
            trainer.seconds |= {"logprobs": 0.0, "reference": 0.0}
            trainer.update_seconds.clear()


class _WholeSteps(TrainerCallback):
    """Times whole steps, and computes rewards."""

    def __init__(self) -> None:
        self.tokens, self._start = 0, 0.0
        answer({"ready": True})

    def reward(self, completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.tokens = sum(map(len, completion_ids))
        return [score_text(text) for text in completions]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        wait_for_step()
        self._start = read_clock()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        answer({"whole": read_clock() - self._start, "logprob_sums": [], "tokens_computed": self.tokens})


def build_trainer(options: argparse.Namespace) -> GRPOTrainer:
    """Build TRL's trainer with our algorithm settings."""
    core = Tokenizer(WordLevel(WORDS, unk_token="<pad>"))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    samples_itself = options.workload == "rollouts"
    num_updates = 1 if samples_itself else NUM_UPDATES
    config = GRPOConfig(
        output_dir=str(options.model / "trl"),
        per_device_train_batch_size=options.trl_micro_batch,
        gradient_accumulation_steps=options.prompts * options.samples // options.trl_micro_batch,
        num_generations=options.samples,
        max_completion_length=WORKLOADS[options.workload][1],
        num_iterations=num_updates,
        beta=KL_COEF if options.workload == "reference" else 0.0,
        max_steps=num_updates * options.num_steps,
        learning_rate=SMALL_LEARNING_RATE if samples_itself else LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    prompts = Dataset.from_dict({"prompt": draw_prompts(options)})
    settings: dict[str, Any] = dict(model=model, args=config, train_dataset=prompts, processing_class=tokenizer)
    if samples_itself:
        clock = _WholeSteps()
        return GRPOTrainer(reward_funcs=clock.reward, callbacks=[clock], **settings)
    return ScriptedTrainer(options, **settings)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_worker_options(parser)
    torch.set_num_threads(1)
    build_trainer(parser.parse_args()).train()
