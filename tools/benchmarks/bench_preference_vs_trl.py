# SPDX-License-Identifier: Apache-2.0
"""A DPO step against TRL's trainer: same model, pairs, optimizer and losses; CPU-seconds per step.

    OMP_NUM_THREADS=1 python tools/benchmarks/bench_preference_vs_trl.py --trl-python VENV/bin/python --json FILE

Needs TRL (`pip install trl==1.16.0`), here or in the environment of `--trl-python`. Each side is a process with one
thread, and they run in turns. A step is the log-probs of the reference and one update; both log the same losses.

    ragged   32 pairs of prompts of 32 tokens with responses of up to 128 (geometric, mean about 45)
    prompt   32 pairs of prompts of 256 tokens with responses of up to 64 (geometric, mean about 33)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

from tools.benchmarks._scripted_workloads import Workload, draw_geometric_lengths
from tools.benchmarks._step_contest import MARK, MODEL, WORKLOADS, answer

PAIRS, WARM_UP, LEARNING_RATE, BETA = 32, 1, 1e-4, 0.1
LETTERS = string.ascii_letters


def write_pairs(directory: Path, workload: str, steps: int) -> None:
    """Write pairs whose every token is a letter."""
    prompt, longest, mean = WORKLOADS[workload]
    assert mean is not None
    rows = []
    for step in range(steps):
        lengths = draw_geometric_lengths((PAIRS, 2), mean, longest - 1, step)
        drawn = [*Workload([prompt] * PAIRS, lengths, step).draw_tokens(len(LETTERS))]
        for (tokens, chosen), (_, rejected) in zip(drawn[0::2], drawn[1::2], strict=True):
            texts = ["".join(LETTERS[token] for token in part) for part in (tokens, chosen, rejected)]
            rows.append(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)))
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(directory: Path) -> None:
    """Write a random model and a tokenizer with a token per letter."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    from tools.benchmarks._bench_actor import write_random_model

    write_random_model(directory, MODEL)
    vocab = {"<pad>": 0, "<eos>": 1} | {letter: i for i, letter in enumerate(LETTERS, start=2)}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False, use_regex=False), Decoder()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(directory)


def run_ours(directory: Path, workload: str, steps: int) -> dict[str, Any]:
    """Take the steps with this package."""
    import megatron_rl.run.preference as program
    from megatron_rl.run.loading import load_config

    prompt, longest, _ = WORKLOADS[workload]
    seconds, losses = list[float](), list[float]()

    class TimedTrainer(program.PreferenceTrainer):
        def update(self, examples: Any) -> Any:
            start = time.process_time()
            samples = super().update(examples)
            seconds.append(time.process_time() - start)
            losses.append(self.run.series["preference/loss"][-1])
            return samples

    settings = [
        *(f"model.path={directory}", "model.dtype=float32", f"data.train_files=[{directory}/pairs.jsonl]"),
        *(f"data.train_batch_size={PAIRS}", f"data.max_prompt_length={prompt}", f"data.max_response_length={longest}"),
        *("data.shuffle=false", f"actor.lr={LEARNING_RATE}", "actor.weight_decay=0", "actor.adam_beta2=0.999"),
        *("actor.max_tokens_per_microbatch=4096", "actor.logprob_chunk_tokens=4096", f"trainer.total_steps={steps}"),
        *(f"preference.beta={BETA}", "trainer.save_freq=null", f"trainer.run_dir={directory}/run-{os.getpid()}"),
    ]
    program.PreferenceTrainer = TimedTrainer
    program.train_preferences(load_config(None, settings).config, None)
    return {"seconds": seconds, "losses": losses}


def run_trl(directory: Path, workload: str, steps: int) -> dict[str, Any]:
    """Take the steps with an unchanged DPOTrainer."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    seconds = list[float]()

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.process_time() - self.start)

    config = DPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=PAIRS,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        beta=BETA,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        gradient_checkpointing=False,
        bf16=False,
        max_length=None,
        train_sampling_strategy="sequential",
    )
    rows = [json.loads(line) for line in (directory / "pairs.jsonl").read_text().splitlines()]
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(directory),
        callbacks=[Clock()],
    )
    trainer.train()
    return {"seconds": seconds, "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row]}


def compare(options: argparse.Namespace, workload: str, directory: Path) -> dict[str, Any]:
    """Run both sides in turns; return their median CPU-seconds per step and the largest difference of losses."""
    write_model(directory)
    write_pairs(directory, workload, options.steps)
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    for _ in range(options.rounds):
        for side, python in (("ours", sys.executable), ("trl", options.trl_python)):
            command = [python, __file__, "--side", side, "--model", str(directory)]
            command += ["--workloads", workload, "--steps", str(options.steps)]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            lines = [line for line in result.stdout.splitlines() if line.startswith(MARK)]
            if not lines:
                raise SystemExit(f"{side} failed:\n{result.stderr[-3000:]}")
            found[side].append(json.loads(lines[-1].removeprefix(MARK)))
    medians = {
        side: statistics.median(x for part in parts for x in part["seconds"][WARM_UP:]) for side, parts in found.items()
    }
    pairs = zip(found["ours"][0]["losses"], found["trl"][0]["losses"], strict=True)
    return {**medians, "ratio": medians["trl"] / medians["ours"], "loss_difference": max(abs(a - b) for a, b in pairs)}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=sys.executable, help="Python with TRL")
    parser.add_argument("--workloads", nargs="+", choices=("ragged", "prompt"), default=["ragged", "prompt"])
    parser.add_argument("--steps", type=int, default=6, help="steps of a run; the first is not counted")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--json", type=Path, help="file of the result")
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run = run_ours if options.side == "ours" else run_trl
        answer(run(options.model, options.workloads[0], options.steps))
        return
    results = {}
    for workload in options.workloads:
        with tempfile.TemporaryDirectory() as directory:
            results[workload] = compare(options, workload, Path(directory))
        print(workload, json.dumps(results[workload]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
