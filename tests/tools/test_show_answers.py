# SPDX-License-Identifier: Apache-2.0
"""Scores and answers before and after a run, on files that a run writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.observability.metrics import write_rows
from tools import show_answers as tool


def write_step(run_dir: Path, step: int, rewards: list[float], first_prompt: int = 0) -> None:
    rows = [
        {
            "prompt_id": first_prompt + i,
            "sample_index": 0,
            "prompt": f"{'x' * 200 * (i == 2)}\nWhat is {i} + 1?",
            "response": f"{i}",
            "ground_truth": f"{i + 1}",
            "reward": reward,
            "reward_components": {"math": reward, "last_number": 0.0, "math_timeouts": 0.0},
        }
        for i, reward in enumerate(rewards)
    ]
    write_rows(run_dir / "validation/sums", step, rows)


def test_the_first_step_is_compared_with_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, right in ((0, 2), (8, 5), (16, 9)):
        write_step(tmp_path, step, [1.0] * right + [0.1] * (10 - right))
    assert tool.main([str(tmp_path), "--prompts", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sums, 10 responses:" and lines[1].split() == ["step", "0", "step", "16"]
    scores = {line.split()[0]: line.split(maxsplit=1)[1].split("  ") for line in lines[2:5]}
    # Intervals: statsmodels.stats.proportion.proportion_confint(k, 10, method="wilson").
    before, after = "0.200 [0.057, 0.510]", "0.900 [0.596, 0.982]"
    for rule in ("reward", "math"):
        assert [part.strip() for part in scores[rule] if part] == [before, after]
    assert [part.strip() for part in scores["last_number"] if part] == ["0.000 [0.000, 0.278]"] * 2
    assert lines[6:10] == [
        "  prompt 'What is 0 + 1?'",
        "  truth  '1'",
        "  before '0' (reward 1)",
        "  after  '0' (reward 1)",
    ]
    assert len(lines) == 5 + 3 * 5 and lines[16] == f"  prompt '... {'x' * 85}\\nWhat is 2 + 1?'"


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(tmp_path)]) == 2 and "no validation responses in" in capsys.readouterr().err
    write_step(tmp_path, 0, [1.0])
    assert tool.main([str(tmp_path)]) == 2 and "holds 1 steps" in capsys.readouterr().err
    write_step(tmp_path, 4, [1.0], first_prompt=1)
    assert tool.main([str(tmp_path)]) == 2 and "other prompts at the end" in capsys.readouterr().err
