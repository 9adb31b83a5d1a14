# SPDX-License-Identifier: Apache-2.0
"""summary.json of a run, and its best responses, made from files of the run directory alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from pathlib import Path
from typing import Any

from megatron_rl.observability.durable import replace_text
from megatron_rl.observability.metric_table import accuracy_set
from megatron_rl.observability.metrics import ROLLOUTS, Record, read_metrics, step_of

SUMMARY_FILE = "summary.json"
NUM_BEST = 3  # responses of the last step
_BEGINNING, _END = 60, 100  # characters of a response on the console


def write_summary(run_dir: Path, extra: Mapping[str, Any] | None = None) -> Path:
    """Write summary.json from metrics.jsonl, with extra entries (JSON values), and return its path.

    Raises:
        UserError: metrics.jsonl is missing or unreadable.
    """
    path = Path(run_dir) / SUMMARY_FILE
    summary = {**summarize(read_metrics(run_dir)), **(extra or {})}
    replace_text(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return path


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """Summarize the records of a run.

    Returns:
        `steps` (training steps, so without step 0), `seconds_total` (sum of `time/step`, or of the phases of a record
        without it), `seconds` and `tokens` by name, and `first`, `last`, `best` with their steps of `reward` and of
        `validation` by data set. Entries without data are null.
    """
    keys = sorted({key for record in records for key in record})
    return {
        "steps": max((step_of(record) for record in records), default=0),
        "seconds_total": sum(_seconds_of(record) for record in records),
        "seconds": _sums(records, "time/"),
        "tokens": {name: total for name, total in _sums(records, "tokens/").items() if name != "per_second"},
        "reward": _course(records, "reward/mean"),
        "validation": {name: _course(records, key) for key in keys if (name := accuracy_set(key))},
    }


def find_best_responses(run_dir: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the last step of a run and the rows of its `NUM_BEST` best-rewarded responses at most, the best first.

    Among equal rewards, responses to different prompts come first.
    """
    step = max(map(step_of, read_metrics(run_dir)), default=0)
    path = Path(run_dir) / ROLLOUTS / f"step_{step}.jsonl"
    if not path.exists():
        return step, []
    with path.open(encoding="utf-8") as file:
        return step, nsmallest(NUM_BEST, map(json.loads, file), key=lambda row: (-row["reward"], row["sample_index"]))


def format_response(row: Mapping[str, Any]) -> str:
    """Return a row of `find_best_responses` as one line, with escapes and without the middle of a long response."""
    truth, response = (repr(row[name]) for name in ("ground_truth", "response"))
    if len(response) > _BEGINNING + _END:
        response = f"{response[:_BEGINNING]} ... {response[-_END:]}"
    return f"reward {row['reward']:.4g}, ground truth {truth[:_BEGINNING]}, response {response}"


def phase_seconds(record: Record) -> dict[str, float]:
    """Return the seconds of a record by phase, without the whole step's."""
    times = ((key.removeprefix("time/"), value) for key, value in record.items() if key.startswith("time/"))
    return {name: value for name, value in times if name != "step" and value is not None}


def _seconds_of(record: Record) -> float:
    whole = record.get("time/step")
    return sum(phase_seconds(record).values()) if whole is None else whole


def _sums(records: Sequence[Record], prefix: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for record in records:
        for key, value in record.items():
            if key.startswith(prefix) and value is not None:
                name = key.removeprefix(prefix)
                sums[name] = sums.get(name, 0) + value
    return dict(sorted(sums.items()))


def _course(records: Sequence[Record], key: str) -> dict[str, float | int | None]:
    """Return the first, last and best value (largest, the earliest of equals) of a metric, with their steps."""
    points = [(step_of(record), value) for record in records if (value := record.get(key)) is not None]
    if not points:
        return dict.fromkeys(("first", "first_step", "last", "last_step", "best", "best_step"))
    best = max(points, key=lambda point: point[1])
    course = {}
    for name, (step, value) in (("first", points[0]), ("last", points[-1]), ("best", best)):
        course |= {name: value, f"{name}_step": step}
    return course
