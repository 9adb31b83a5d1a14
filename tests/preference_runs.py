# SPDX-License-Identifier: Apache-2.0
"""Small runs of preference learning from inside a test, on pairs and steps of the toy task's sums."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from distributed import run_ranks
from megatron_rl.run.loading import load_config
from megatron_rl.run.preference import train_preferences
from rl_runs import leave_out_curves, read_records

COMPARED = ("preference/", "policy/grad_norm", "validation/")
LAYOUTS = {
    "tp2": "actor.tensor_model_parallel_size=2",
    "pp2": "actor.pipeline_model_parallel_size=2",
    "cp2": "actor.context_parallel_size=2",
    "dp2": "actor.zero_stage=0",
    "zero3": "actor.zero_stage=3",
}


def list_pairs(task: Path) -> list[dict[str, Any]]:
    """Pairs of uneven length: the sum, and a wrong one, a digit longer or shorter."""
    rows = [json.loads(line) for line in (task / "train.jsonl").read_text().splitlines()]
    pairs = [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": str(i) * (1 + i % 3)}
        for i, row in enumerate(rows)
    ]
    return [pair for pair in pairs if pair["chosen"] != pair["rejected"]]


def list_steps(task: Path) -> list[dict[str, Any]]:
    """Responses of one to three steps that `=` separates; a step with an even first digit is right."""
    steps = [[str(i), "53", "8"][: 1 + i % 3] for i in range(16)]
    return [
        {"prompt": row["prompt"], "completions": part, "labels": [int(step[0]) % 2 == 0 for step in part]}
        for row, part in zip(list_pairs(task), steps, strict=False)
    ]


def train_on_rank(rank: int, world_size: int, overrides: Sequence[str]) -> None:
    """Run the program on a rank of `run_ranks`."""
    leave_out_curves()
    os.environ["WORLD_SIZE"] = str(world_size)
    train_preferences(load_config(None, overrides).config, None)


def learn(
    task: Path, directory: Path, rows: Sequence[dict[str, Any]], *extra: str, world_size: int = 1
) -> list[dict[str, float]]:
    """Train three steps on rows, which are also validated; return the records."""
    directory.mkdir(exist_ok=True)
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        *(f"model.path={task}/model", "model.dtype=float32", f"data.train_files=[{file}]"),
        *(f"data.validation_files=[{file}]", "data.train_batch_size=5", "trainer.total_steps=3", "actor.lr=1e-3"),
        *("data.max_prompt_length=8", "data.max_response_length=8", "actor.max_tokens_per_microbatch=32"),
        *(f"trainer.run_dir={directory}/run", *extra),
    ]
    run_ranks(train_on_rank, world_size, overrides, timeout=200)
    return read_records(directory / "run")


def keep_compared(records: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """The numbers of each record that depend on weights and data only."""
    return [{name: value for name, value in one.items() if name.startswith(COMPARED)} for one in records]


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """The exported weights of the last step."""
    (found,) = (directory / "run" / "checkpoints").glob("step_3/huggingface")
    return load_file(next(found.glob("*.safetensors")))
