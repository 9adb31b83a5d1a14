# SPDX-License-Identifier: Apache-2.0
"""The graded set of the curriculum benchmark, and its summary. Not covered: its runs, which take 20 minutes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tools.benchmarks.bench_curriculum import COUNTS, grade, summarize, write_graded


def test_the_set_has_its_levels(tmp_path: Path) -> None:
    sums = [(a, b) for a in range(10, 50) for b in range(50, 90)] + [(a, 100) for a in range(100, 500)]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    (tmp_path / "train_mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_graded(tmp_path)
    graded = [json.loads(line) for line in (tmp_path / "graded.jsonl").read_text().splitlines()]
    assert Counter(row["level"] for row in graded) == COUNTS
    for row in graded:
        a, b = map(int, row["prompt"].rstrip("=").split("+"))
        carries = a % 10 + b % 10 > 9 or a // 10 + b // 10 > 9
        assert row["level"] == grade(row) == (2 if a > 99 else int(carries))


def test_the_summary_has_means_and_spreads() -> None:
    runs = [
        {"arm": "levels", "reached": rollouts, "uninformative": 0.5, "curve": [(0, 0.1), (9, last)]}
        for rollouts, last in ((100, 0.5), (300, 0.7))
    ]
    late = {"arm": "uniform", "reached": None, "uninformative": 0.75, "curve": [(9, 0.25)]}
    found = dict(summarize([*runs, late]))
    assert found["uniform"] == {"runs": 1, "reached": 0, "accuracy": 0.25, "accuracy_std": 0.0, "uninformative": 0.75}
    assert (found["levels"]["rollouts"], found["levels"]["rollouts_std"]) == (200, 100)
    assert round(found["levels"]["accuracy"], 6) == 0.6 and found["levels"]["reached"] == 2
