# SPDX-License-Identifier: Apache-2.0
"""Rows of rollouts/step_<N>.jsonl, with texts and values of each response token, and summary.json of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nsmallest
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.observability.metric_table import accuracy_set
from megatron_rl.observability.metrics import ROLLOUTS, Record, read_metrics, replace_text, step_of

SUMMARY_FILE = "summary.json"
NUM_BEST = 3  # responses of the last step
_BEGINNING, _END = 60, 100  # characters of a response on the console
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MOST_PARTS = 8  # tokens of one character, which has at most four bytes


class TokenTexts:
    """Decoder of single tokens; the joined texts are the response (after sentencepiece's leading space).

    A character of several tokens belongs to the last of them.

    Args:
        decode: token ids -> text, without special tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}
        self._anchor: list[int] = []  # the token in front of every decoded one, once found
        self._anchor_text = ""

    def __call__(self, tokens: Sequence[int] | np.ndarray) -> list[str]:
        """Return the texts of tokens [s]."""
        texts: list[str] = []
        parts: list[int] = []
        for token in map(int, tokens) if not self._anchor else ():
            text = self._decode([token])
            if text.strip() and _BROKEN not in text:
                self._anchor, self._anchor_text = [token], text
                self._known.clear()
                break
        for token in map(int, tokens):
            if token not in self._known:  # behind another token: some tokenizers drop the leading space of a text
                self._known[token] = self._decode([*self._anchor, token])[len(self._anchor_text) :]
            text = self._known[token]
            if _BROKEN not in text:
                if parts:  # an unfinished character
                    texts[-1] = self._decode(parts)
                    parts = []
                texts.append(text)
                continue
            parts.append(token)
            joined = self._decode(parts)
            is_whole = _BROKEN not in joined or len(parts) == _MOST_PARTS
            texts.append(joined if is_whole else "")
            parts = [] if is_whole else parts
        if parts:
            texts[-1] = self._decode(parts)
        return texts


def token_fields(num_tokens: int, values: Mapping[str, np.ndarray]) -> dict[str, list[float | None]]:
    """Return per-token values as lists of one entry per response token, null for tokens without a value.

    Args:
        values: name -> [k] values of the last k tokens; NaN is no value. Names without any value are left out.
    """
    return {
        name: [None] * (num_tokens - len(column)) + as_numbers(column)
        for name, column in values.items()
        if np.isfinite(column).any()
    }


def as_numbers(values: np.ndarray, decimals: int = 6) -> list[float | None]:
    """Return rounded numbers for JSON, null for non-finite ones."""
    rounded = np.round(np.asarray(values, np.float64), decimals)
    if np.isfinite(rounded).all():
        return rounded.tolist()
    return [x if np.isfinite(x) else None for x in rounded.tolist()]


def write_rows(run_dir: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rollouts to `<run_dir>/rollouts/step_<N>.jsonl`, one JSON object per line."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (run_dir / ROLLOUTS).mkdir(parents=True, exist_ok=True)
    # A lone surrogate, which an engine or a reward may return, becomes its JSON escape.
    replace_text(run_dir / ROLLOUTS / f"step_{step}.jsonl", "".join(lines), errors="backslashreplace")


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
    sums: dict[str, dict[str, float]] = {"time": {}, "tokens": {}}
    keys = sorted({key for record in records for key in record})
    for key in keys:
        kind, _, name = key.partition("/")
        if kind in sums and key != "tokens/per_second":
            sums[kind][name] = sum(record.get(key) or 0 for record in records)
    return {
        "steps": max((step_of(record) for record in records), default=0),
        "seconds_total": sum(
            sum(phase_seconds(record).values()) if (whole := record.get("time/step")) is None else whole
            for record in records
        ),
        "seconds": sums["time"],
        "tokens": sums["tokens"],
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
    """Return the seconds of a record by phase, without the time of the whole step."""
    times = ((key.removeprefix("time/"), value) for key, value in record.items() if key.startswith("time/"))
    return {name: value for name, value in times if name != "step" and value is not None}


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
