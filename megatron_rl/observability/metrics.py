# SPDX-License-Identifier: Apache-2.0
"""Records of steps, and where they go: the interface of sinks, metrics.jsonl and TensorBoard's event files.

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
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.types import UserError

METRICS_FILE, ROLLOUTS, CONFIG_FILE = "metrics.jsonl", "rollouts", "config.yaml"
VALIDATION = "validation"  # holds a folder of rollouts for each set
MOST_CHARACTERS = 4000  # of a shown text; rollouts/ has all of it
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
    for name in ("prompt", "response", "ground_truth", "reward", "finish_reason"):
        lines = re.split(r"\r\n|\r|\n", shorten(str(row.get(name, ""))))
        parts += [name.replace("_", " "), "\n".join(f"    {line}" for line in lines)]
    return "\n\n".join(parts).encode("utf-8", "backslashreplace").decode()  # event files accept no lone surrogates


def shorten(text: str) -> str:
    """Return the first MOST_CHARACTERS of a text, and the number of omitted ones."""
    left_out = len(text) - MOST_CHARACTERS
    return text if left_out <= 0 else f"{text[:MOST_CHARACTERS]} [{left_out:,} more characters]"
