# SPDX-License-Identifier: Apache-2.0
"""Terminal output of a run: one line per step, and bars of its progress (plain lines without a terminal)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from megatron_rl.observability.metric_table import accuracy_set, format_columns
from megatron_rl.observability.metrics import NumberRecord, Sink
from megatron_rl.observability.rollout_progress import RolloutCount
from megatron_rl.observability.summary import phase_seconds

LINE_SECONDS = 10.0  # between two lines about a rollout without a terminal
_REDRAWS_PER_SECOND = 2


class ConsoleLines(Sink):
    """Sink that prints a line `every` n steps, for the last step, and for each step with a validation."""

    def __init__(self, total_steps: int, every: int, print_line: Callable[[str], None]) -> None:
        self._total_steps, self._every, self._print = total_steps, every, print_line

    def log(self, step: int, record: NumberRecord) -> None:
        """Print the line of a step if it is due."""
        is_due = step % self._every == 0 or step == self._total_steps
        if is_due or any(key.startswith("validation/") for key in record):
            self._print(format_console_line(step, self._total_steps, record))


def format_console_line(step: int, total_steps: int, metrics: NumberRecord) -> str:
    """Return the line of a step: its metrics, then the seconds of its phases, the longest first."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}", *format_columns(metrics)]
    phases = sorted(phase_seconds(metrics).items(), key=lambda item: -item[1])
    words = " ".join(f"{name} {value:.2f}" for name, value in phases)
    total = f"{metrics['time/step']:.2f} s" if "time/step" in metrics else "s" if words else ""
    return " | ".join(parts + ([f"{total}: {words}" if words else total] if total else []))


class Pace:
    """Elapsed and remaining seconds of a run since its start, or since its resumption after `done` steps."""

    def __init__(self, total: int, done: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.done = total, done
        self._clock, self._first, self._start = clock, done, clock()
        self._began = self._last = self._start

    def mark(self, step: int) -> None:
        """Mark a step as done; step 0 is the validation before training, which does not count for the speed."""
        self.done, self._last = max(step, self.done), self._clock()
        if self.done == self._first:
            self._began = self._last

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    @property
    def remaining(self) -> float | None:
        """Seconds until the last step is done, at the mean speed so far; `None` before the first step."""
        steps = self.done - self._first
        if not steps:
            return None
        left = (self._last - self._began) / steps * (self.total - self.done)
        return max(0.0, left - (self._clock() - self._last))


class ProgressDisplay(Sink):
    """Sink that shows the progress of a run, unless it is not wanted, on a stream or on stdout."""

    def __init__(self, pace: Pace, *, is_wanted: bool = True, stream: TextIO | None = None) -> None:
        self._pace, self._is_wanted, self._stream = pace, is_wanted, stream
        self._notes: dict[str, str] = {}
        self._said_at = 0.0
        self._bars: Progress | None = None
        if is_wanted and (stream or sys.stdout).isatty():
            self._bars = self._draw(stream)

    def _draw(self, stream: TextIO | None) -> Progress:
        bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            _Remaining(),
            TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=Console(file=stream or sys.stdout),
            refresh_per_second=_REDRAWS_PER_SECOND,
            redirect_stdout=stream is None,
            redirect_stderr=stream is None and sys.stderr.isatty(),
        )
        self._steps = bars.add_task("step", total=self._pace.total, count="", pace=self._pace, note="")
        self._rollout = bars.add_task("rollout", total=None, visible=False, count="", pace=None, note="")
        self._show_steps(bars)
        bars.start()
        bars.console.show_cursor(True)  # a killed process could not restore it
        return bars

    def _show_steps(self, bars: Progress) -> None:
        bars.update(
            self._steps,
            completed=self._pace.done,
            count=f"{self._pace.done}/{self._pace.total}",
            note=" | ".join(note for note in self._notes.values() if note),
        )

    def log(self, step: int, record: NumberRecord) -> None:
        """Move the bar of steps, with the last reward (SFT: loss) and validation as its note."""
        now = {key: record[key] for key in ("reward/mean", "sft/loss") if key in record}
        validation = {key: value for key, value in record.items() if accuracy_set(key)}
        for name, shown in (("now", now), ("validation", validation)):
            if shown:
                self._notes[name] = " | ".join(format_columns(shown))
        if self._bars is not None:
            self._show_steps(self._bars)

    def show_rollout(self, name: str, count: RolloutCount | None) -> None:
        """Show the progress of a generation, `None` at its end; may be called by another thread."""
        if self._bars is not None:
            if count is None:
                self._bars.update(self._rollout, visible=False)
                return
            if not self._bars.tasks[self._rollout].visible:
                self._bars.reset(self._rollout, total=count.total)
            self._bars.update(
                self._rollout,
                visible=True,
                description=name,
                total=count.total,
                completed=count.finished,
                count=f"{count.finished}/{count.total} responses",
                note=f"{count.tokens_per_second:,.0f} tok/s",
            )
        elif self._is_wanted and count is not None and count.seconds >= LINE_SECONDS:
            now = time.monotonic()
            if now - self._said_at >= LINE_SECONDS:
                self._said_at = now
                self.print(
                    f"{name}: {count.finished}/{count.total} responses, {count.tokens:,} tokens, "
                    f"{count.tokens_per_second:,.0f} tok/s, {count.seconds:.0f} s"
                )

    def print(self, line: str) -> None:
        """Print a line, above the bars if there are any."""
        if self._bars is not None:
            self._bars.console.print(Text(line), soft_wrap=True)
        else:
            print(line, file=self._stream or sys.stdout, flush=True)

    def close(self) -> None:
        """Remove the bars."""
        if self._bars is not None:
            self._bars.update(self._rollout, visible=False)
            self._bars.stop()
            self._bars = None


class _Remaining(ProgressColumn):
    """Column with the time until the run ends; empty for a rollout, which has no estimate."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        pace: Pace | None = task.fields["pace"]
        if pace is None:
            return Text("")
        left = pace.remaining
        return Text("eta -" if left is None else f"eta {timedelta(seconds=round(left))}")
