# SPDX-License-Identifier: Apache-2.0
"""Sums as chat prompts: right answers, no shared prompt, the same bytes for the same arguments, and a second opinion.

Not covered: launch/quickstart_real.sh, which downloads the model and trains it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.recipes.last_number import last_number
from launch_runs import ROOT
from megatron_rl.run.loading import load_config
from tools import make_sums_task as tool


@pytest.mark.parametrize(("operation", "function"), tool.OPERATIONS.items())
def test_answers_are_right_and_no_prompt_is_shared(operation: str, function: object, tmp_path: Path) -> None:
    assert tool.main(["--out", str(tmp_path), "--operation", operation, "--largest", "9", "--validation", "10"]) == 0
    files = [(tmp_path / f"{name}.jsonl").read_text() for name in ("validation", "train")]
    parts = [[json.loads(line) for line in text.splitlines()] for text in files]
    assert [len(part) for part in parts] == [10, 54]
    asked = {}
    for row in sum(parts, []):
        [message] = row["prompt"]
        left, said, right = message["content"].removeprefix("What is ").split("?")[0].split()
        assert said == operation and row["answer"] == str(function(int(left), int(right)))
        asked[left, right] = row
    assert len(asked) == 64
    tool.main(["--out", str(tmp_path), "--operation", operation, "--largest", "9", "--validation", "10"])
    assert files == [(tmp_path / f"{name}.jsonl").read_text() for name in ("validation", "train")]


def test_a_validation_set_of_all_prompts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--out", str(tmp_path / "task"), "--largest", "4", "--validation", "9"]) == 2
    assert "--validation 9 of 9 prompts" in capsys.readouterr().err and not (tmp_path / "task").exists()


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("42", 1.0),
        ("The answer is 42.", 1.0),
        ("17 + 25 = 42", 1.0),
        ("42 is 17 + 25", 0.0),
        ("17 + 25", 0.0),
        ("", 0.0),
    ],
)
def test_the_second_rule_reads_the_last_number(response: str, score: float) -> None:
    assert last_number("sums", response, "42", {}) == score


def test_only_the_first_rule_of_the_recipe_is_learned_from() -> None:
    config = load_config(ROOT / "launch/recipes/smollm2_sums.yaml", []).config
    weights = {component.split()[1]: float(component.split()[0]) for component in config.reward.components}
    assert weights == {"math_any": 1.0, "launch/recipes/last_number.py:last_number": 0.0}
