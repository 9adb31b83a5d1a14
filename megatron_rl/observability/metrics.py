# SPDX-License-Identifier: Apache-2.0
"""Records of steps and rollouts, and where they go: sinks, metrics.jsonl, rollouts/, summary.json, TensorBoard.

metrics.jsonl has one strict JSON object per step: `step` first, the other keys sorted, null for a non-finite number.
Each line is flushed, so a run that dies keeps every finished step.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nsmallest
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.observability.metric_table import accuracy_set
from megatron_rl.types import UserError

METRICS_FILE, ROLLOUTS, CONFIG_FILE = "metrics.jsonl", "rollouts", "config.yaml"
VALIDATION = "validation"  # holds a folder of rollouts for each set
MOST_CHARACTERS = 4000  # of a shown text; rollouts/ has all of it
SAMPLE_FIELDS = ("label", "prompt", "response", "ground_truth", "reward", "finish_reason")
NumberRecord = Mapping[str, int | float]
Record = Mapping[str, float | None]  # as read back: null for non-finite numbers


class Sink:
    """Destination of a run's data; a sink overrides the methods whose data it can show."""

    def log(self, step: int, record: NumberRecord) -> None:
        """Take the record of one step: metric -> number, sorted; step 0 is before training."""

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Receive distributions of a step: arrays of values by name."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take some rollouts of a step, as rows of rollouts/step_<N>.jsonl."""

    def alarm(self, step: int, name: str, text: str) -> None:
        """Receive an alarm of `health.py`: the name of the failed check and a sentence that explains it."""

    def close(self) -> None:
        """Write buffered data; may be called again."""


class MetricsFile(Sink):
    """Sink that appends to metrics.jsonl in a run directory, which is created if missing."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / METRICS_FILE).open("a", encoding="utf-8")

    def log(self, step: int, record: NumberRecord) -> None:
        """Write one line."""
        self._file.write(encode_record(step, record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def plain_record(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """Convert Python, numpy or torch scalars to Python numbers, sorted by name."""
    return {
        key: int(metrics[key]) if isinstance(metrics[key], numbers.Integral) else float(metrics[key])
        for key in sorted(metrics)
    }


def encode_record(step: int, metrics: NumberRecord) -> str:
    """Return one line of metrics.jsonl: `step`, then the sorted metrics; non-finite numbers become null."""
    if "step" in metrics:
        raise ValueError("'step' is not a metric")
    finite = {key: metrics[key] if math.isfinite(metrics[key]) else None for key in sorted(metrics)}
    return json.dumps({"step": step, **finite}, allow_nan=False)


def has_records(run_dir: Path) -> bool:
    """Return True if a run has written metrics to the directory."""
    path = Path(run_dir) / METRICS_FILE
    return path.exists() and path.stat().st_size > 0


def set_aside(run_dir: Path, after_step: int) -> Path | None:
    """Move records and rollouts of later steps, if any, to `attempt-<n>/` with a copy of the config; return that path.

    Earlier records keep their bytes; a last line that was cut off is deleted. An interrupted call can be repeated: no
    record is lost, but some may exist twice.

    Raises:
        UserError: a line is not JSON.
    """
    path, attempt = run_dir / METRICS_FILE, None
    records = read_metrics(run_dir) if path.exists() else []
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line] if path.exists() else []
    kept = sum(step_of(record) <= after_step for record in records)
    rollouts = [
        file for file in (run_dir / ROLLOUTS).glob("step_*.jsonl") if int(file.stem.removeprefix("step_")) > after_step
    ]
    if len(records) > kept or rollouts:
        attempt = next(found for n in count(1) if not (found := run_dir / f"attempt-{n}").exists())
        (attempt / ROLLOUTS).mkdir(parents=True)
        replace_text(attempt / METRICS_FILE, "".join(line + "\n" for line in lines[kept : len(records)]))
        if (run_dir / CONFIG_FILE).exists():
            shutil.copy(run_dir / CONFIG_FILE, attempt)
        for file in rollouts:
            file.rename(attempt / ROLLOUTS / file.name)
    if len(lines) > kept:
        replace_text(path, "".join(line + "\n" for line in lines[:kept]))
    return attempt


def step_of(record: Record) -> int:
    """Return the step of a record of `read_metrics`."""
    return int(record["step"] or 0)


def read_metrics(run_dir: Path) -> list[dict[str, float | None]]:
    """Return the records of a run, without a last line that a crash cut off."""
    path, records = Path(run_dir) / METRICS_FILE, []
    if not path.exists():
        raise UserError(
            f"there is no {path}",
            source="run directory",
            expected="the directory of a run that has logged a step",
            hint="check the path",
        )
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            records += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            if number < len(lines):  # else no newline follows: the write was cut off
                raise UserError(
                    f"the line is no JSON: {error}",
                    source=f"{path}:{number}",
                    expected="one JSON object per line",
                    hint="remove the line",
                ) from error
    return records


def replace_text(path: Path, text: str, errors: str = "strict") -> None:
    """Replace a file atomically and durably; `errors` handles what UTF-8 cannot encode, as in `str.encode`."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8", errors=errors) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class TensorBoard(Sink):
    """Sink that writes <run_dir>/tensorboard.

    Args:
        after_step: TensorBoard hides existing events after this step; `None` for a new run.
        samples_every: steps between two sets of sample texts; 0 for none.
    """

    def __init__(self, run_dir: Path, after_step: int | None = None, samples_every: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a slow import

        first = None if after_step is None else after_step + 1
        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first)
        self._samples_every = samples_every

    def log(self, step: int, record: NumberRecord) -> None:
        """Write the scalars."""
        for key, value in record.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Write the distributions of finite values."""
        for name, found in values.items():
            finite = found[np.isfinite(found)]
            if len(finite):
                self._writer.add_histogram(name, finite, step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the texts of rollouts in every `samples_every`-th step."""
        if is_due(step, self._samples_every):
            for number, row in enumerate(rows, 1):
                self._writer.add_text(f"samples/{number}", format_sample(row), step)

    def alarm(self, step: int, name: str, text: str) -> None:
        """Write the alarm as a text of the step."""
        self._writer.add_text(f"health/{name}", text, step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def is_due(step: int, every: int) -> bool:
    """Return True for step 1 and every n-th step, never if `every` is 0."""
    return every > 0 and (step == 1 or step % every == 0)


def format_sample(row: Mapping[str, Any]) -> str:
    """Return a rollout in Markdown, with texts indented so that Markdown and HTML in them have no effect."""
    parts = []
    for name in (name for name in SAMPLE_FIELDS if row.get(name) is not None):
        lines = re.split(r"\r\n|\r|\n", shorten(str(row[name])))
        parts += [name.replace("_", " "), "\n".join(f"    {line}" for line in lines)]
    return "\n\n".join(parts).encode("utf-8", "backslashreplace").decode()  # event files accept no lone surrogates


def shorten(text: str) -> str:
    """Return the first MOST_CHARACTERS of a text, and the number of omitted ones."""
    left_out = len(text) - MOST_CHARACTERS
    return text if left_out <= 0 else f"{text[:MOST_CHARACTERS]} [{left_out:,} more characters]"


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
    response, truth = repr(row["response"]), row["ground_truth"]
    shown = f", ground truth {repr(truth)[:_BEGINNING]}" if truth else ""
    if len(response) > _BEGINNING + _END:
        response = f"{response[:_BEGINNING]} ... {response[-_END:]}"
    return f"reward {row['reward']:.4g}{shown}, response {response}"


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
