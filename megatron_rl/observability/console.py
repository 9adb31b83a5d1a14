# SPDX-License-Identifier: Apache-2.0
"""Terminal of a run, on rank 0: a summary, a bar while it starts, a line per step, bars, and its end.

Lines fit the terminal's width; without a terminal they fit WIDTH columns.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from megatron_rl.observability.metrics import (
    NumberRecord,
    Sink,
    accuracy_set,
    find_metric,
    format_columns,
    phase_seconds,
)
from megatron_rl.observability.progress import Pace, RolloutCount

WIDTH = 100  # columns
LINE_SECONDS = 10.0  # between two lines about a rollout without a terminal
MANY_STEPS, SHORT_SECONDS, EVERY = 200, 10.0, 10  # without a terminal: of more and shorter steps, every tenth
_REDRAWS_PER_SECOND = 2
_VALUE_WIDTH = 6  # of a column, at least
_TIME_WIDTH = 22  # that other columns leave to the seconds
# Columns that stay longest if a line has no room for all.
_KEPT = ("reward/mean", "sft/loss", "preference/loss", "policy/grad_norm", "tokens/per_second", "kl/mean")


def find_width() -> int:
    """Return the columns of the terminal, or WIDTH without one."""
    return Console(file=sys.stdout).width if sys.stdout.isatty() else WIDTH


def format_summary(rows: Iterable[tuple[str, str]], width: int = WIDTH) -> list[str]:
    """Return a table of labels and texts as lines of at most `width` columns."""
    rows = [*rows]
    indent = max(len(label) for label, _ in rows) + 2
    lines = []
    for label, text in rows:
        parts = textwrap.wrap(text, max(width - indent, 20), break_on_hyphens=False) or [""]
        lines += [f"{name:{indent}}{part}" for name, part in zip([label, *[""] * len(parts)], parts)]
    return lines


def format_console_line(
    step: int, total_steps: int, record: NumberRecord, width: int = WIDTH, widths: dict[str, int] | None = None
) -> str:
    """Return the line of a step: metrics, then its seconds and the longest phase with its share, then validation.

    Columns that do not fit are left out, and validation that does not fit stands on a line of its own.

    Args:
        widths: widest text of each column so far, which this call updates; columns keep their places.
    """
    widths = {} if widths is None else widths
    head = f"step {step:>{len(str(total_steps))}}/{total_steps}"
    texts = format_columns(record)
    validation = [text for key, text in texts.items() if accuracy_set(key)]
    columns = {}
    for key, text in texts.items():
        if not accuracy_set(key):
            least = len(text.rpartition(" ")[0]) + 1 + _VALUE_WIDTH
            widths[key] = max(widths.get(key, least), len(text))
            columns[key] = text.ljust(widths[key])
    names = {key: metric.name for key in columns if (metric := find_metric(key))}
    seconds = _describe_seconds(record)
    room, kept = width - len(head) - 3 - max(len(seconds), _TIME_WIDTH), set[str]()
    for key in sorted(columns, key=lambda key: _KEPT.index(names[key]) if names[key] in _KEPT else len(_KEPT)):
        room -= 3 + len(columns[key])
        if room < 0:
            break
        kept.add(key)
    parts = [head, *(text for key, text in columns.items() if key in kept), *([seconds] if seconds else [])]
    line = " | ".join(parts).rstrip()
    if not validation:
        return line[:width]
    found = " | ".join(validation)
    if len(line) + 3 + len(found) <= width:
        return f"{line} | {found}"
    indent = " " * len(head)
    return "\n".join([line[:width], *textwrap.wrap(found, width, initial_indent=indent, subsequent_indent=indent)])


def _describe_seconds(record: NumberRecord) -> str:
    phases = phase_seconds(record)
    total = record.get("time/step", sum(phases.values()))
    if not total:
        return ""
    if not phases:
        return f"{total:.2f} s"
    longest = max(phases, key=lambda name: phases[name])
    return f"{total:.2f} s: {longest}" + (f" {phases[longest] / total:.0%}" if len(phases) > 1 else "")


@contextmanager
def show_start(text: str) -> Iterator[None]:
    """Show a moving bar on a terminal while the block runs."""
    if not sys.stdout.isatty():
        yield
        return
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=sys.stdout), refresh_per_second=4, transient=True) as bars:
        bars.add_task(text, total=None)
        yield


def list_next_commands(run_dir: Path) -> list[str]:
    """Return lines about a finished run: its newest checkpoint, and the two commands that follow a run."""
    newest = run_dir / "checkpoints" / "latest"
    lines = [f"checkpoint: {newest.resolve()}"] if newest.exists() else []
    lines.append(f"read the responses: python tools/view_rollouts.py {run_dir} --out rollouts.html")
    return lines + (
        [f"evaluate the policy: python tools/evaluate.py {run_dir}/config.yaml model.path={run_dir}"]
        if newest.exists()
        else []
    )


class ProgressDisplay(Sink):
    """Sink that prints a line for each step and the progress of a generation: bars on a terminal, else plain lines."""

    def __init__(self, pace: Pace, *, stream: TextIO | None = None) -> None:
        self._pace, self._stream = pace, stream
        self._widths: dict[str, int] = {}
        self._notes: dict[str, str] = {}
        self._said_at = 0.0
        self._bars: Progress | None = None
        if (stream or sys.stdout).isatty():
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
        done, note = self._pace.done, " | ".join(self._notes.values())
        bars.update(self._steps, completed=done, count=f"{done}/{self._pace.total}", note=note)

    def log(self, step: int, record: NumberRecord) -> None:
        """Print the step's line and move the bar of steps, with the last reward (SFT: loss) and validation."""
        if self._is_shown(step, record):
            width = WIDTH if self._bars is None else self._bars.console.width
            self.print(format_console_line(step, self._pace.total, record, width, self._widths))
        now = {key: record[key] for key in ("reward/mean", "sft/loss") if key in record}
        validation = {key: value for key, value in record.items() if accuracy_set(key)}
        for name, shown in (("now", now), ("validation", validation)):
            if shown:
                self._notes[name] = " | ".join(format_columns(shown).values())
        if self._bars is not None:
            self._show_steps(self._bars)

    def _is_shown(self, step: int, record: NumberRecord) -> bool:
        """Return whether a step has a line: all but nine of ten short ones of a long run without a terminal."""
        total, seconds = self._pace.total, record.get("time/step")
        if self._bars is not None or total <= MANY_STEPS or seconds is None or seconds >= SHORT_SECONDS:
            return True
        return step in (1, total) or step % EVERY == 0 or any(map(accuracy_set, record))

    def show_rollout(self, name: str, count: RolloutCount | None) -> None:
        """Show the progress of a generation, `None` at its end; may be called by another thread."""
        if self._bars is not None and count is None:
            self._bars.update(self._rollout, visible=False)
        elif self._bars is not None and count is not None:
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
        elif count is not None and count.seconds >= LINE_SECONDS:
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
    """Column of the display with the estimated time until the run ends; empty in the row of a rollout."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        pace: Pace | None = task.fields["pace"]
        if pace is None:
            return Text("")
        left = pace.remaining
        return Text("eta -" if left is None else f"eta {timedelta(seconds=round(left))}")
