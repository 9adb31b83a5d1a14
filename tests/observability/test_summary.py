# SPDX-License-Identifier: Apache-2.0
"""summary.json from metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.observability.metrics import summarize, write_summary

RECORDS = [
    {"step": 0, "validation/math/accuracy": 0.25, "time/validation": 2.0},
    {
        "step": 1,
        "reward/mean": 0.5,
        "time/step": 3.0,
        "time/rollout": 2.0,
        "tokens/prompt": 10,
        "tokens/response": 30,
        "tokens/per_second": 100.0,
    },
    {
        "step": 2,
        "reward/mean": None,
        "validation/math/accuracy": 0.75,
        "time/step": 5.0,
        "time/rollout": 3.0,
        "tokens/prompt": 12,
        "tokens/response": 40,
        "tokens/per_second": 90.0,
    },
    {
        "step": 3,
        "reward/mean": 0.25,
        "validation/math/accuracy": 0.75,
        "time/step": 4.0,
        "tokens/prompt": 8,
        "tokens/response": 20,
    },
]


def test_summary_of_a_run() -> None:
    summary = summarize(RECORDS)
    assert summary["steps"] == 3
    assert summary["seconds_total"] == 14.0
    assert summary["seconds"] == {"rollout": 5.0, "step": 12.0, "validation": 2.0}
    assert summary["tokens"] == {"prompt": 30, "response": 90}
    assert summary["reward"] == {
        "first": 0.5,
        "first_step": 1,
        "last": 0.25,
        "last_step": 3,
        "best": 0.5,
        "best_step": 1,
    }
    assert summary["validation"] == {
        "math": {"first": 0.25, "first_step": 0, "last": 0.75, "last_step": 3, "best": 0.75, "best_step": 2}
    }


def test_summary_of_an_empty_run_is_null() -> None:
    summary = summarize([])
    assert summary["steps"] == 0 and summary["seconds_total"] == 0
    assert set(summary["reward"].values()) == {None}
    assert summary["validation"] == {}


def test_summary_file_holds_the_extra_entries(tmp_path: Path) -> None:
    text = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (tmp_path / "metrics.jsonl").write_text(text)
    path = write_summary(tmp_path, {"world_size": 4})
    assert path == tmp_path / "summary.json"
    assert json.loads(path.read_text()) == {**summarize(RECORDS), "world_size": 4}
