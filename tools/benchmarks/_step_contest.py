# SPDX-License-Identifier: Apache-2.0
"""Parts shared by both sides of bench_step_vs_trl.py; independent of megatron_rl, for TRL's environment.

A side is a process that reports when it is ready, then takes a step and prints a line for each line on stdin.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tools.benchmarks._scripted_workloads import Workload, draw_geometric_lengths

MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "dtype": "float32",
    "pad_token_id": 0,
    "eos_token_id": 1,
}
# Prompt tokens, longest response, mean of the geometric lengths (`None`: all longest).
WORKLOADS: dict[str, tuple[int, int, float | None]] = {
    "ragged": (32, 128, 49.0),
    "prompt": (256, 64, 40.0),
    "fixed": (32, 128, None),
    "reference": (32, 128, 49.0),
    "rollouts": (32, 128, 49.0),
}
WORDS = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, MODEL["vocab_size"])}
PARTS = ("packing", "logprobs", "reference", "update", "whole")
KL_COEF = 0.01
LEARNING_RATE = 1e-4
SMALL_LEARNING_RATE = 1e-8  # each side samples: a learning policy would change the lengths
NUM_UPDATES = 2  # per step; with one update and no engine correction, TRL skips its log-prob pass, too
MARK = "ANSWER "


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a side."""
    parser.add_argument("--model", type=Path, help="directory of the model")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), help="see the description")
    parser.add_argument("--num-steps", type=int, default=1, help="steps that will be asked for")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="responses to each")
    parser.add_argument("--max-tokens", type=int, default=4096, help="ours: actor.max_tokens_per_microbatch")
    parser.add_argument("--trl-micro-batch", type=int, default=32, help="TRL: per_device_train_batch_size")


def draw_workload(options: argparse.Namespace, step: int) -> Workload:
    """Draw a step's responses."""
    prompt, longest, mean = WORKLOADS[options.workload]
    shape = (options.prompts, options.samples)
    lengths = draw_geometric_lengths(shape, mean, longest, step) if mean else [[longest] * shape[1]] * shape[0]
    return Workload([prompt] * shape[0], lengths, step)


def draw_prompts(options: argparse.Namespace) -> list[str]:
    """Draw all prompts, a word per token."""
    count = options.prompts * options.num_steps
    work = Workload([WORKLOADS[options.workload][0]] * count, [[1]] * count)
    return [" ".join(f"t{token}" for token in prompt) for prompt, _ in work.draw_tokens(MODEL["vocab_size"])]


def score_text(text: str) -> float:
    """Return the share of even words as reward."""
    words = text.split()
    return sum(word[-1] in "02468" for word in words) / max(len(words), 1)


def wait_for_step() -> None:
    """Wait for the driver, or exit with it."""
    if not sys.stdin.readline():
        raise SystemExit(0)


def answer(message: dict[str, Any]) -> None:
    """Print a line with a mark, which library output lacks."""
    print(MARK + json.dumps(message), flush=True)


def read_clock() -> float:
    """Return CPU-seconds, or wall seconds on a GPU."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
