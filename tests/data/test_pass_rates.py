# SPDX-License-Identifier: Apache-2.0
"""Prompts chosen by measured pass rates. The measuring itself is in tests/tools/test_evaluate.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.sections import DataConfig
from megatron_rl.data.pass_rates import select_by_pass_rate
from megatron_rl.data.prompts import PromptSet
from megatron_rl.types import Prompt, UserError

FILES = ["a/train.jsonl", "b/train.jsonl"]
STARTS = [0, 4]  # rows 0 to 3 and 0 to 2; row 1 of the first file was dropped
IDS = [0, 2, 3, 4, 5, 6]
RATES = {"a-train": {0: 0.0, 2: 0.5, 3: 1.0}, "b-train": {0: 0.25, 1: 0.75, 2: 1.0}}


def make_set() -> PromptSet:
    prompts = [Prompt(i, np.zeros(1, np.int32), f"text {i}", "") for i in IDS]
    return PromptSet(prompts, 0, 1, STARTS)


def write(folder: Path, rates: dict[str, dict[int, float]] = RATES, step: int = 0, **changes: Any) -> None:
    """Four responses to each prompt; those that are right are punished for their length."""
    for name, start in zip(rates, STARTS, strict=True):
        rows = [
            {
                "prompt_id": row,
                "prompt": f"text {start + row}",
                "reward": 1.0 - 0.75 if sample < 4 * rate else 0.0,
                "reward_components": {"math": 1.0, "overlong": -0.75} if sample < 4 * rate else {"math": 0.0},
            }
            | changes
            for row, rate in rates[name].items()
            for sample in range(4)
        ]
        file = folder / name / "rollouts" / f"step_{step}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def select(folder: Path, low: float, high: float) -> tuple[list[int], list[str], list[int]]:
    cfg = DataConfig(train_files=FILES, train_batch_size=1, pass_rates=str(folder), pass_rate_range=[low, high])
    found, notes = select_by_pass_rate(make_set(), cfg, shaping="overlong")
    return [prompt.prompt_id for prompt in found.prompts], notes, found.file_sizes


def test_prompts_in_the_range_are_kept(tmp_path: Path) -> None:
    """Both ends count, rows count in their own file, and a correct answer stays correct despite a length penalty."""
    write(tmp_path)
    ids, notes, sizes = select(tmp_path, 0.1, 0.9)
    assert (ids, sizes) == ([2, 4, 5], [1, 2])
    assert notes == ["data.pass_rates: 3 of 6 prompts are right in 0.1 to 0.9 of the cases"]
    assert select(tmp_path, 0.25, 0.5)[0] == [2, 4]
    assert select(tmp_path, 0, 1)[0] == IDS


def test_the_latest_evaluation_counts(tmp_path: Path) -> None:
    write(tmp_path, step=9)
    write(tmp_path, {name: dict.fromkeys(rates, 0.5) for name, rates in RATES.items()}, step=10)
    assert select(tmp_path, 0.1, 0.9)[0] == IDS


def test_an_episode_that_failed_says_nothing_about_its_prompt(tmp_path: Path) -> None:
    """Of four, two are right, one is wrong, and one timed out or has the reward that stands for a missing one."""
    for changes in ({"finish_reason": "timeout"}, {"reward_components": {"service_failures": 1.0}}):
        write(tmp_path, {name: dict.fromkeys(rates, 0.5) for name, rates in RATES.items()})
        for file in tmp_path.glob("*/rollouts/step_0.jsonl"):
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            rows = [row | changes if i % 4 == 3 else row for i, row in enumerate(rows)]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert select(tmp_path, 0.6, 0.7)[0] == IDS
        rows = [row | {"finish_reason": "error"} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(UserError, match="has not been measured"):
            select(tmp_path, 0.6, 0.7)


def test_what_was_not_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no rollouts of a/train.jsonl") as caught:
        select(tmp_path, 0, 1)
    assert "a-train/rollouts/step_<N>.jsonl" in str(caught.value)
    write(tmp_path, RATES | {"b-train": {0: 0.5, 1: 0.5}})
    with pytest.raises(UserError, match="row 2 .* of b/train.jsonl has not been measured"):
        select(tmp_path, 0, 1)
    write(tmp_path, prompt="another text")
    with pytest.raises(UserError, match="row 0 .* of a/train.jsonl was another one"):
        select(tmp_path, 0, 1)
    write(tmp_path, reward_components=None)
    with pytest.raises(UserError, match="step_0.jsonl:1 is no scored rollout"):
        select(tmp_path, 0, 1)
