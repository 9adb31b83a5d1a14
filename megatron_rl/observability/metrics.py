# SPDX-License-Identifier: Apache-2.0
"""Where the numbers of a step go: metrics.jsonl, TensorBoard, and one line on the console.

`metrics.jsonl` is the record: one strict JSON object per step, `step` first and the other keys
sorted, floats in full, a number that is not finite as null; each line is flushed, so a run that
dies keeps every finished step. The other sinks show the same numbers. Only the writer rank writes;
on other ranks every call returns at once.
"""

from __future__ import annotations

import json
import math
import numbers
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from megatron_rl.types import UserError

METRICS_FILE = "metrics.jsonl"

# (metric, label, format) in the order of the console line
_CONSOLE = (
    ("reward/mean", "reward", "{:.4f}"),
    ("sft/loss", "loss", "{:.4f}"),
    ("kl/mean", "kl", "{:.2e}"),
    ("policy/clip_fraction", "clip", "{:.4f}"),
    ("policy/grad_norm", "grad", "{:.3g}"),
    ("mismatch/max", "mismatch", "{:.1e}"),
    ("tokens/per_second", "tok/s", "{:,.0f}"),
)


class SinkSettings(Protocol):
    """What the sink reads of the config section `observability`."""

    @property
    def tensorboard(self) -> bool:
        """Write TensorBoard event files."""

    @property
    def progress_bar(self) -> bool:
        """Show a progress bar on a terminal."""

    @property
    def console_every(self) -> int:
        """Steps between two console lines."""


class MetricsSink:
    """Writes the metrics of each step.

    Args:
        run_dir: run directory; made if it is not there.
        total_steps: steps of the run, for "step/total" and the ETA.
        config: what to write where; the section `observability` of the run.
        is_writer: True on the one rank that writes.
        after_step: go on with a run: what it wrote about later steps is dropped; None: a new run.
        stream: console; default stdout. The progress bar needs a terminal.

    Raises:
        UserError: `run_dir` holds the metrics of another run and `after_step` is None.
    """

    def __init__(
        self,
        run_dir: Path,
        total_steps: int,
        config: SinkSettings,
        is_writer: bool,
        *,
        after_step: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.run_dir, self.total_steps, self.config, self.is_writer = Path(run_dir), total_steps, config, is_writer
        self._stream = stream or sys.stdout
        self._file: TextIO | None = None
        self._tensorboard: Any = None
        self._bar: tqdm | None = None
        if is_writer:
            self._open(after_step)

    def _open(self, after_step: int | None) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        path = self.run_dir / METRICS_FILE
        if after_step is not None:
            drop_records(self.run_dir, after_step)
        elif has_records(self.run_dir):
            raise UserError(
                f"{path} already holds the metrics of a run", source="trainer.run_dir",
                expected="a new or empty run directory", hint="choose another trainer.run_dir, or remove this one",
            )
        self._file = path.open("a", encoding="utf-8")
        if self.config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # imports slowly, and only here

            first = None if after_step is None else after_step + 1  # TensorBoard hides what it has from there on
            self._tensorboard = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=first)
        if self.config.progress_bar and self._stream.isatty():
            self._bar = tqdm(total=self.total_steps, unit="step", file=self._stream, dynamic_ncols=True,
                             initial=max(after_step or 0, 0))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step.

        Args:
            step: number of the step; 0 is before training.
            metrics: metric -> number; keys as in metrics.jsonl.
        """
        if self._file is None:
            return
        record = {key: _plain_number(metrics[key]) for key in sorted(metrics)}
        self._file.write(encode_record(step, record) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for key, value in record.items():
                self._tensorboard.add_scalar(key, value, step)
            self._tensorboard.flush()
        is_due = step % self.config.console_every == 0 or step == self.total_steps
        if is_due or any(key.startswith("validation/") for key in record):
            self._print(format_console_line(step, self.total_steps, record))
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def _print(self, line: str) -> None:
        if self._bar is not None:
            tqdm.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Close all sinks; may be called again."""
        for sink in (self._bar, self._tensorboard, self._file):
            if sink is not None:
                sink.close()
        self._bar = self._tensorboard = self._file = None

    def __enter__(self) -> MetricsSink:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def encode_record(step: int, metrics: Mapping[str, float]) -> str:
    """One line of metrics.jsonl: `step`, then the sorted metrics; non-finite numbers become null."""
    if "step" in metrics:
        raise ValueError("'step' is not a metric")
    finite = {key: metrics[key] if math.isfinite(metrics[key]) else None for key in sorted(metrics)}
    return json.dumps({"step": step, **finite}, allow_nan=False)


def has_records(run_dir: Path) -> bool:
    """True if a run has written metrics there."""
    path = Path(run_dir) / METRICS_FILE
    return path.exists() and path.stat().st_size > 0


def drop_records(run_dir: Path, after_step: int) -> None:
    """Remove the records of later steps, and a last line that was cut off; the others keep their bytes.

    Raises:
        UserError: a line is no JSON.
    """
    path = Path(run_dir) / METRICS_FILE
    if path.exists():
        kept = sum(record["step"] <= after_step for record in _read_lines(path))
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in lines[:kept]), encoding="utf-8")
        partial.replace(path)


def read_metrics(run_dir: Path) -> list[dict[str, float | None]]:
    """The records of a run in the order written; a last line cut off by a crash is left out."""
    return list(_read_lines(Path(run_dir) / METRICS_FILE))


def _read_lines(path: Path) -> Iterator[dict[str, float | None]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(
            f"there is no {path}", source="run directory", expected="the directory of a run that has logged a step",
            hint="check the path",
        ) from error
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return  # no newline behind it: the write was cut off
            raise UserError(
                f"the line is no JSON: {error}", source=f"{path}:{number}", expected="one JSON object per line",
                hint="remove the line",
            ) from error


def format_console_line(step: int, total_steps: int, metrics: Mapping[str, float]) -> str:
    """The line that sums up a step: what is learned, whether it is healthy, where the seconds went."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for key, label, form in _CONSOLE:
        if key in metrics:
            parts.append(f"{label} {form.format(metrics[key])}")
        if key == "reward/mean":
            parts += _validation_parts(metrics)
    seconds = _seconds_part(metrics)
    return " | ".join(parts + ([seconds] if seconds else []))


def _validation_parts(metrics: Mapping[str, float]) -> list[str]:
    scores = {key: value for key, value in metrics.items() if is_validation_accuracy(key)}
    return [f"val {key.split('/', 1)[1].rpartition('/')[0]} {value:.4f}" for key, value in scores.items()]


def is_validation_accuracy(key: str) -> bool:
    """True for `validation/<set>/accuracy`."""
    return key.startswith("validation/") and key.endswith("/accuracy")


def _seconds_part(metrics: Mapping[str, float]) -> str:
    phases = {key.removeprefix("time/"): value for key, value in metrics.items() if key.startswith("time/")}
    total = phases.pop("step", None)
    longest_first = sorted(phases.items(), key=lambda item: -item[1])
    words = " ".join(f"{name} {value:.2f}" for name, value in longest_first)
    if total is None:
        return f"s: {words}" if words else ""
    return f"{total:.2f} s" + (f": {words}" if words else "")


def _plain_number(value: Any) -> int | float:
    """A Python number of a Python, numpy or torch scalar."""
    return int(value) if isinstance(value, numbers.Integral) else float(value)
