# SPDX-License-Identifier: Apache-2.0
"""bench_real_recipes.py: settings of every case, the files that it makes, and what it reads from runs.

Not covered: the runs, which need the published model and minutes each.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.run.loading import load_config
from tools.benchmarks import _real_tasks as tasks
from tools.benchmarks import bench_real_recipes as bench


@pytest.mark.parametrize("name", bench.CASES)
def test_settings_of_a_case_are_valid(name: str) -> None:
    task, settings = bench.CASES[name]
    assert task == "sums" or task in tasks.TASKS
    load_config(bench.RECIPE, list(settings))


def test_a_pair_is_a_right_and_a_wrong_response_to_the_same_prompt(tmp_path: Path) -> None:
    prompts = [{"prompt": [{"role": "user", "content": name}], "answer": "1"} for name in "abc"]
    tasks.write_rows(tmp_path / "prompts.jsonl", prompts)
    scores = {0: (1.0, 0.0, 1.0), 1: (0.0, 0.0, 0.0), 2: (0.0, 1.0, 0.0)}
    rollouts = [
        {"prompt_id": prompt, "reward": score, "response": f"{prompt}.{number}", "finish_reason": "stop"}
        for prompt, found in scores.items()
        for number, score in enumerate(found)
    ]
    rollouts.append({"prompt_id": 0, "reward": 0.0, "response": "cut", "finish_reason": "length"})
    assert tasks.write_pairs(tmp_path / "prompts.jsonl", rollouts, 1, tmp_path / "pairs.jsonl") == 2
    pairs = tasks.read_rows(tmp_path / "pairs.jsonl")
    found = {
        (row["prompt"][0]["content"], *(row[key][0]["content"] for key in ("chosen", "rejected"))) for row in pairs
    }
    assert found == {("a", "0.0", "0.1"), ("c", "2.1", "2.0")}


def test_demonstrations_are_sums_as_the_rule_reads_them(tmp_path: Path) -> None:
    tasks.make_sums(tmp_path, "+", 15)
    tasks.write_demonstrations(tmp_path / "train.jsonl", 5, tmp_path / "demonstrations.jsonl")
    rows = tasks.read_rows(tmp_path / "demonstrations.jsonl")
    assert len(rows) == 5 and {row["response"].partition(" = ")[2] for row in rows} == {row["answer"] for row in rows}
    assert all(row["response"].partition(" = ")[0] in row["prompt"][0]["content"] for row in rows)


def test_a_product_follows_a_call_of_the_calculator(tmp_path: Path) -> None:
    tasks.make_calculator(tmp_path)
    rows = [tasks.read_rows(tmp_path / f"{name}.jsonl") for name in ("train", "validation")]
    assert [len(part) for part in rows] == [1000, 128]
    left, right = rows[0][0]["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?").split(" * ")
    assert rows[0][0]["answer"] == str(int(left) * int(right))
    assert [message["role"] for message in rows[0][0]["prompt"]] == ["user", "assistant", "tool", "assistant", "user"]


def test_questions_of_words_are_short_and_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [{"question": f"How many are {n % 1000}? Give the result now.", "answer": n % 1000} for n in range(4000)]
    made[5]["question"] = "long " * 50
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=lambda name, size, seed: made))
    tasks.make_words(tmp_path, "aiw")
    train, validation = (tasks.read_rows(tmp_path / f"{name}.jsonl") for name in ("train", "validation"))
    asked = [row["prompt"][-1]["content"] for row in train + validation]
    assert (len(train), len(validation), len(set(asked))) == (640, 128, 768)
    assert all(question.endswith("?") and len(question) < 50 for question in asked)


def test_preferences_are_measured_before_halfway_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, ...]] = []

    def launch(directory: Path, options: argparse.Namespace, program: str, *arguments: str) -> None:
        launched.append((program, *arguments))
        rights = [number % 2 for number in range(64)] if directory.name == "sampled" else [1, 0, 0, 0]
        rows: list[dict[str, Any]] = [
            {"prompt_id": number // 2, "reward": float(right), "response": "1", "finish_reason": "stop"}
            for number, right in enumerate(rights)
        ]
        if "evaluate" in program:
            tasks.write_rows(directory / "validation/rollouts/step_0.jsonl", rows)

    tasks.make_sums(tmp_path / "sums", "+", 15)
    monkeypatch.setattr(bench, "SUMS", tmp_path / "sums")
    monkeypatch.setattr(bench, "launch", launch)
    options = bench.build_parser().parse_args(["--out", str(tmp_path)])
    rows = bench.run_case("dpo", 3, options)
    assert [(row["step"], row[bench.ACCURACY]) for row in rows] == [(0, 0.25), (1, 0.25), (2, 0.25)]
    programs = [Path(program).stem for program, *_ in launched]
    assert programs == ["evaluate", "pretrain_preference", "evaluate", "evaluate", "evaluate"]
    assert bench.run_case("dpo", 3, options) == rows and len(launched) == 5  # not repeated
    assert bench.summarize(rows)["accuracy"] == [0.25] * 3


def test_a_summary_has_seconds_without_validation() -> None:
    rows = [{"step": 0, bench.ACCURACY: 0.25, "time/validation": 1.0}]
    rows += [{"step": step, "reward/mean": step / 4, "time/step": 5.0 + step} for step in (1, 2, 3)]
    rows[-1] |= {bench.ACCURACY: 0.5, "time/validation": 3.0}
    found = bench.summarize(json.loads(json.dumps(rows)))
    assert (found["accuracy"], found["reward"], found["step_seconds"]) == ([0.25, 0.5], [0.25, 0.75], 6.0)
    assert found["interval"][0] < 0.5 < found["interval"][1]
