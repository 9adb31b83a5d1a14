# SPDX-License-Identifier: Apache-2.0
"""A run and its directory: sinks, timers, the record of a step, and alarms about the curves.

<run_dir>/ metrics.jsonl config.yaml tensorboard/ wandb/ logs/rank<N>.log rollouts/ checkpoints/step_<N>/
           summary.json curves.png status.html stopped.json wandb_id run.lock schedule/ traces/
           attempt-<n>/  metrics.jsonl, rollouts/ and config.yaml of steps that were done again

Alarms are sentences with the numbers behind them. Every check compares the last `window` steps with the first window,
with the window that ended four windows ago, or with a limit. docs/health.md has a section for each check.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from operator import gt, lt
from pathlib import Path
from statistics import fmean, median, pvariance
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.distributed.distributed_c10d import Store

from megatron_rl.config.sections import HealthConfig, ObservabilityConfig
from megatron_rl.observability.metrics import (
    CONFIG_FILE,
    ROLLOUTS,
    STOPPED_FILE,
    SUMMARY_FILE,
    VALIDATION,
    MetricsFile,
    Record,
    Sink,
    TensorBoard,
    find_best_responses,
    find_metric,
    format_response,
    has_records,
    is_due,
    log_path,
    plain_record,
    read_metrics,
    replace_text,
    set_aside,
    step_of,
    write_rows,
    write_summary,
)
from megatron_rl.observability.progress import (
    Pace,
    PhaseTimers,
    RolloutCount,
    RolloutProgress,
    close_rank_log,
    last_line,
    open_rank_log,
)
from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.observability.console import ProgressDisplay
    from megatron_rl.observability.status import Positions, StatusPage


_ROOM_BYTES = 1 << 20  # free space that a run needs to begin
_NUM_SAMPLES = 4  # rollouts of a step that are passed to sinks


class Run:
    """Sinks and timers of one run; rank 0 writes, and every rank has its own log.

    The constructor creates the directory and the log; `start` changes existing files and opens the sinks.

    Raises:
        OSError: the directory cannot be written, or its disk is full.
    """

    def __init__(
        self, run_dir: Path, config_yaml: str, total_steps: int, settings: ObservabilityConfig, rank: int
    ) -> None:
        self.dir, self.is_writer, self.timers = run_dir, rank == 0, PhaseTimers()
        self.best_value = float("-inf")  # highest `trainer.best_metric` so far
        self.failed_saves: list[dict[str, Any]] = []  # {"step", "error"} of checkpoints that could not be written
        self._config_yaml, self._total_steps, self._settings = config_yaml, total_steps, settings
        self.series: dict[str, list[float]] = {}  # all values of each metric counted in this step, in order
        self._sinks: list[Sink] = []
        self._writer = ThreadPoolExecutor(1, "rollouts")
        self._writing: Future[None] | None = None
        self._pace = Pace(total_steps)
        self._display: ProgressDisplay | None = None
        self._rollout: RolloutCount | None = None
        self._health = HealthMonitor(settings.health)
        self._speed: Callable[[Record], dict[str, float]] | None = None
        run_dir.mkdir(parents=True, exist_ok=True)
        if self.is_writer:  # a full disk or a quota fails here and not in the log
            with tempfile.TemporaryFile(dir=run_dir) as file:
                file.write(bytes(_ROOM_BYTES))
                os.fsync(file.fileno())
        self.log_file = log_path(run_dir, rank)
        self.log = open_rank_log(run_dir, rank)
        self.page: StatusPage | None = None  # from now on, since loading a model takes minutes
        if self.is_writer and settings.status_port is not None:
            from megatron_rl.observability.status import open_page

            self.page = open_page(run_dir, settings, self._describe_now, self.log)

    @property
    def is_finished(self) -> bool:
        """True if the run of this directory is complete."""
        return (self.dir / SUMMARY_FILE).exists()

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.dir / "checkpoints"

    def resume(self, best_value: float | None, failed_saves: Sequence[dict[str, Any]]) -> None:
        """Restore the best validation value and the list of failed saves from a checkpoint; call it before `start`."""
        self.best_value = float("-inf") if best_value is None else best_value
        self.failed_saves = list(failed_saves)

    def start(self, after_step: int | None, positions: Positions = tuple) -> None:
        """Open the sinks (UserError if one cannot be opened).

        Args:
            after_step: continue the existing run after this step (-1: repeat it) and move its output of later steps to
                `attempt-<n>/`; `None` begins a new run.
            positions: returns the last heartbeat of every rank.
        """
        if not self.is_writer:
            return
        (self.dir / ROLLOUTS).mkdir(exist_ok=True)
        attempt = None if after_step is None else set_aside(self.dir, after_step)
        if attempt is not None:
            self.log.info("records of steps that are done again are kept: %s", attempt)
        for name in (STOPPED_FILE, SUMMARY_FILE):
            (self.dir / name).unlink(missing_ok=True)
        settings, add = self._settings, self._sinks.append
        self._pace = Pace(self._total_steps, max(after_step or 0, 0))
        add(MetricsFile(self.dir))
        records = read_metrics(self.dir)
        for record in records:
            self._health.add(step_of(record), record)
        if self.page is not None:
            self.page.begin(records, positions)
            add(self.page)
        for name in settings.trackers:
            if name == "tensorboard":
                add(TensorBoard(self.dir, after_step, settings.histograms_every))
            elif name != "otlp":  # which gets spans, of every rank
                from megatron_rl.observability.trackers import TRACKERS

                add(TRACKERS[name](self.dir, settings, self._config_yaml, self._total_steps))
        from megatron_rl.observability.console import ProgressDisplay

        self._display = ProgressDisplay(self._pace)
        add(self._display)
        replace_text(self.dir / CONFIG_FILE, self._config_yaml)

    def describe(self, rows: Iterable[tuple[str, str]], arithmetic: Iterable[str], explains: bool) -> None:
        """Log a summary of the run, and `arithmetic`, on the console only if `explains`."""
        if self.is_writer:
            from megatron_rl.observability.console import find_width, format_summary

            for line in format_summary(rows, find_width()):
                self.log.info("%s", line)
        for line in arithmetic:
            self.log.log(logging.INFO if explains else logging.DEBUG, "  %s", line)

    @contextmanager
    def starting(self, text: str) -> Iterator[None]:
        """Show on a terminal and on the status page that the block, a part of the start, runs; log its seconds."""
        began, shown = time.monotonic(), nullcontext()
        self.timers.begin_step(0, text)
        if self.is_writer:
            from megatron_rl.observability.console import show_start

            shown = show_start(text)
        with shown:
            yield
        self.log.debug("%s: %.1f s", text, time.monotonic() - began)

    def count(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the step's record; several values of a metric are averaged."""
        for name, value in metrics.items():
            self.series.setdefault(name, []).append(float(value))

    def complete(self, series: Mapping[str, Sequence[float]], times: Mapping[str, float]) -> None:
        """Merge another rank's metrics and times of this step into the record.

        Args:
            series: values by metric; ignored for a metric that this rank has counted.
            times: from `PhaseTimers.seen`; the larger value of each phase is kept.
        """
        for name, values in series.items():
            self.series.setdefault(name, list(values))
        self.timers.complete(times)

    def counted(self) -> dict[str, float]:
        """Return the metrics counted in this step so far: their means, or first values if `Metric.first_only`."""
        return {
            name: values[0] if (metric := find_metric(name)) and metric.first_only else sum(values) / len(values)
            for name, values in self.series.items()
        }

    def record(self, step: int) -> None:
        """Write the record of one step: its metrics and the seconds of its phases."""
        metrics = self.counted()
        self.series = {}
        seconds = self.timers.pop()
        tokens = metrics.get("tokens/prompt", 0.0) + metrics.get("tokens/response", 0.0)
        if tokens and seconds.get("time/step"):
            metrics["tokens/per_second"] = tokens / seconds["time/step"]
            metrics |= self._speed(metrics | seconds) if self._speed else {}
        record = plain_record({**metrics, **seconds})
        self._pace.mark(step)
        for sink in self._sinks:
            sink.log(step, record)
        for alarm in self._health.add(step, record) if self.is_writer else ():
            self.announce(step, alarm.name, str(alarm))

    def announce(self, step: int, name: str, text: str) -> None:
        """Log an alarm and show it on the status page, in TensorBoard and W&B; do nothing for ""."""
        if self.is_writer and text:
            self.log.warning("%s", text)
            for sink in self._sinks:
                sink.alarm(step, name, text)

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rollouts of a step in the background, one JSON object per line; see `settle`."""
        self.settle()
        if self.is_writer:
            rows = list(rows)
            self._writing = self._writer.submit(write_rows, self.dir, step, rows)
            for sink in self._sinks:
                sink.samples(step, rows[:_NUM_SAMPLES])

    def settle(self) -> None:
        """Wait until the rollouts of `write_rollouts` are on disk; raise the error of their writing."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def write_validation(self, step: int, name: str, rows: Iterable[Mapping[str, Any]], is_shown: bool = False) -> None:
        """Write the responses of a validation set after a step; `is_shown`: pass the first ones to sinks."""
        if self.is_writer:
            rows = list(rows)
            write_rows(self.dir / VALIDATION / name, step, rows)
            for sink in self._sinks if is_shown else ():
                sink.samples(step, rows[:_NUM_SAMPLES])

    def write_histograms(self, step: int, describe: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Pass `describe()` to the sinks every `histograms_every` steps; only on rank 0 with TensorBoard."""
        has_tensorboard = "tensorboard" in self._settings.trackers
        if self.is_writer and has_tensorboard and is_due(step, self._settings.histograms_every):
            values = describe()
            for sink in self._sinks:
                sink.histograms(step, values)

    def follow_speed(self, describe: Callable[[Record], dict[str, float]]) -> None:
        """Add `describe(record)` to the record of every step."""
        self._speed = describe

    def follow_rollouts(self, store: Store) -> RolloutProgress:
        """Return a counter of generated responses; `store` is shared by all ranks."""
        return RolloutProgress(store, self._show_rollout if self.is_writer else None, self.timers.spans)

    def _show_rollout(self, count: RolloutCount | None) -> None:
        self._rollout, display = count, self._display
        if display is not None:
            display.show_rollout("validation" if "validation" in self.timers.phases else "rollout", count)

    def _describe_now(self) -> dict[str, Any]:
        """Return the status page's data that change within a step (phase and times), and the config."""
        phase, seconds = self.timers.current()
        pace, rollout = self._pace, self._rollout
        return {
            "step": pace.done,
            "total_steps": pace.total,
            "phase": phase,
            "phase_seconds": seconds,
            "part": self.timers.part,
            "line": last_line(self.log),
            "elapsed_seconds": pace.elapsed,
            "remaining_seconds": pace.remaining,
            "rollout": rollout and asdict(rollout),
            "updates": len(self.series.get("policy/grad_norm", ())),
            "config": self._config_yaml,
        }

    def last_recorded_step(self) -> int:
        """Return the step of the last record in metrics.jsonl, -1 without one (rank 0 only)."""
        return step_of(read_metrics(self.dir)[-1]) if has_records(self.dir) else -1

    def note_stop(self, content: Mapping[str, Any]) -> None:
        """Write stopped.json, for a run that is to be restarted; the restart removes the file."""
        if self.is_writer:
            replace_text(self.dir / STOPPED_FILE, json.dumps(content) + "\n")

    def is_best(self, metrics: Mapping[str, float], name: str | None) -> bool:
        """Return True, and store it, if the named metric is the highest so far (UserError if it was not measured)."""
        if name is None:
            return False
        if name not in metrics:
            raise UserError(
                f"no metric {name!r} was measured",
                source="trainer.best_metric",
                expected=f"one of {', '.join(sorted(metrics))}",
                hint="name one of them",
            )
        if metrics[name] <= self.best_value:
            return False
        self.best_value = metrics[name]
        return True

    def finish(self) -> None:
        """Close the sinks, write the summary and the curves, and log their paths and the best last responses."""
        self.settle()
        if self.page is not None:
            self.page.end("finished", "")
        self._close_sinks()
        if self.is_writer:
            step, best = find_best_responses(self.dir)
            shown = ("prompt_id", "sample_index", "reward", "response")
            responses = [{"step": step, **{name: row[name] for name in shown}} for row in best]
            alarms = [asdict(alarm) for alarm in self._health.alarms]
            extra = {"failed_saves": self.failed_saves, "alarms": alarms, "best_responses": responses}
            summary = write_summary(self.dir, extra)
            for row in best:
                self.log.info("best of step %d: %s", step, format_response(row))
            for name, course in json.loads(summary.read_text())["validation"].items():
                numbers = (course[key] for key in ("first", "first_step", "last", "last_step", "best"))
                self.log.info("%s accuracy: %.4f at step %d -> %.4f at step %d (best %.4f)", name, *numbers)
            self.log.info("summary: %s", summary)
            from megatron_rl.observability import curves  # once, at the end

            self.log.info("curves:  %s", curves.plot_curves(self.dir))
            from megatron_rl.observability.console import list_next_commands

            for line in list_next_commands(self.dir):
                self.log.info("%s", line)

    def close(self) -> None:
        """Close everything; errors are only logged, so that they do not replace the error that ends a run."""
        while self._sinks or self._writing:
            try:
                self.settle()
                self._close_sinks()
            except Exception as error:
                self.log.warning("after the error that ends the run: %s: %s", type(error).__name__, error)
        self._writer.shutdown()
        if self.timers.spans:
            self.timers.spans.close()
        close_rank_log(self.log)

    def _close_sinks(self) -> None:
        """Close the sinks in reverse order: the last one opened may hold the terminal."""
        while self._sinks:
            self._sinks.pop().close()


_EARLIER = 4  # windows between the steps that are compared
_SMALLEST_MISMATCH = 1e-3  # nats: below it a growing gap is rounding
# Smallest change in standard errors: of the reward to count as a rise, of its components to raise an alarm.
_RISES, _PARTS = 2.0, 6.0


@dataclass(frozen=True)
class Alarm:
    """Message about a health check that failed in a step and had passed before, with a sentence of evidence."""

    name: str
    step: int
    evidence: str

    def __str__(self) -> str:
        return f"health: {self.evidence} (docs/health.md#{self.name})"


class _Courses:
    """History of every metric, and the windows of `window` steps that the checks compare."""

    def __init__(self, window: int) -> None:
        self.window, self.series = window, dict[str, list[float]]()
        self.watched: dict[str, list[str]] = {}  # alarm -> the metrics so far that it watches

    def add(self, record: Record) -> None:
        for key, value in record.items():
            if value is not None and math.isfinite(value):
                if key not in self.series and (metric := find_metric(key)) and metric.alarm:
                    self.watched.setdefault(metric.alarm, []).append(key)
                self.series.setdefault(key, []).append(value)

    def now(self, key: str) -> list[float]:
        """Return the metric's last `window` values; empty if it has fewer."""
        return self.series.get(key, [])[-self.window :] if len(self.series.get(key, ())) >= self.window else []

    def mean(self, key: str) -> float:
        """Return the mean of the last window, or if there is none NaN, with which every comparison is false."""
        return fmean(self.now(key) or [math.nan])

    def first(self, key: str) -> list[float]:
        """Return the metric's first `window` values; empty if they overlap the last window."""
        values = self.series.get(key, [])
        return values[: self.window] if len(values) >= 2 * self.window else []

    def earlier(self, key: str) -> list[float]:
        """Return the values of the window that ended `_EARLIER` windows ago; of a shorter series the `first` window."""
        values, end = self.series.get(key, []), -_EARLIER * self.window
        return values[end - self.window : end] if len(values) >= self.window - end else self.first(key)

    def trend(self, key: str, errors: float) -> int:
        """Return 1 or -1 if the metric rose or fell since `earlier` by more than `errors` standard errors, else 0."""
        then, now = self.earlier(key), self.now(key)
        if not then:
            return 0
        noise = errors * math.sqrt((pvariance(then) + pvariance(now)) / self.window)
        change = fmean(now) - fmean(then)
        return (change > noise) - (change < -noise)


def _entropy(courses: _Courses, floor: float, key: str) -> str | None:
    first, now = courses.first(key), courses.mean(key)
    if not first or now >= floor * fmean(first):
        return None
    return f"the policy's entropy is {now:.2g} nats; it was {fmean(first):.2g} in the first {courses.window} steps."


def _length(courses: _Courses, growth: float, key: str) -> str | None:
    then, now, reward = courses.earlier(key), courses.mean(key), courses.earlier("reward/mean")
    if not then or not reward or now <= growth * fmean(then) or courses.trend("reward/mean", _RISES) > 0:
        return None
    return (
        f"the responses of a step grew from {fmean(then):,.0f} to {now:,.0f} tokens, and the reward did not rise "
        f"({fmean(reward):.3g}, now {courses.mean('reward/mean'):.3g})."
    )


def _mismatch(courses: _Courses, growth: float, *keys: str) -> str | None:
    key = "mismatch/lag0" if "mismatch/lag0" in keys else "mismatch/mean"
    now, least = courses.mean(key), min(courses.first(key), default=math.nan)  # the gap may grow from the first step on
    if math.isnan(least) or now <= max(growth * least, _SMALLEST_MISMATCH):
        return None
    return (
        f"engine and trainer differ by {now:.2g} nats per token on the same weights; it was {least:.2g} in one of the "
        f"first {courses.window} steps."
    )


def _gradient(courses: _Courses, growth: float, key: str) -> str | None:
    then, now = courses.earlier(key), courses.mean(key)
    if not then or now <= growth * median(then):
        return None
    return f"the gradient norm is {now:.3g}; it was {median(then):.3g}."


def _components(courses: _Courses, is_wanted: bool, *keys: str) -> str | None:
    """Tell if a component rises while another falls; `is_wanted`: `components` of the health settings."""
    trends = {name: courses.trend(key, _PARTS) for key in keys if "/" not in (name := key.removeprefix("reward/"))}
    rising, falling = ([name for name in trends if trends[name] == way] for way in (1, -1))
    if not is_wanted or not rising or not falling:
        return None
    return f"components of the reward part: {', '.join(rising)} rises while {', '.join(falling)} falls."


def _critic(courses: _Courses, floor: float, key: str) -> str | None:
    value = courses.mean(key)
    if not courses.first(key) or value >= floor:  # a critic begins at zero or at random
        return None
    return f"the critic explains {value:.2g} of the returns' variance: less than their mean would."


def _engines(courses: _Courses, floor: float, key: str) -> str | None:
    members, lost = courses.series[key], courses.series["engines/lost"]
    most = max(members)
    full = max(place for place, count in enumerate(members) if count >= floor * most)
    if len(members) - 1 - full < courses.window or lost[-1] <= lost[full]:
        return None
    return f"{members[-1]:.0f} of {most:.0f} engines serve: {lost[-1] - lost[full]:.0f} were lost and not replaced."


def _failures(courses: _Courses, limit: float, *keys: str) -> str | None:
    key = next((key for key in sorted(keys) if courses.mean(key) >= limit), None)
    if key is None:
        return None
    value = courses.mean(key)
    if key == "agents/failed":
        return f"{value:.0%} of the episodes fail: their environment raises, ends or does not answer in time."
    return f"the reward service fails on {value:.0%} of the responses."


def _beyond(is_beyond: Callable[[float, float], bool], sentence: str) -> Callable[..., str | None]:
    def check(courses: _Courses, limit: float, key: str) -> str | None:
        return sentence.format(courses.mean(key)) if is_beyond(courses.mean(key), limit) else None

    return check


# Alarm -> its limit in the settings, and its check; arguments after the limit: the metrics that declare the alarm.
CHECKS: dict[str, tuple[str, Callable[..., str | None]]] = {
    "entropy": ("entropy_floor", _entropy),
    "length": ("length_growth", _length),
    "mismatch": ("mismatch_growth", _mismatch),
    "sample-size": (
        "sample_size_floor",
        _beyond(lt, "the importance weights leave {:.0%} of the samples' worth: few tokens carry the gradient."),
    ),
    "gradient": ("gradient_growth", _gradient),
    "clipping": ("clip_limit", _beyond(gt, "{:.0%} of the tokens are clipped.")),
    "truncated": ("truncated_limit", _beyond(gt, "{:.0%} of the responses reach the length limit.")),
    "no-signal": ("uninformative_limit", _beyond(gt, "{:.0%} of the groups have equal rewards and teach nothing.")),
    "restating": (
        "restating_limit",
        _beyond(gt, "{:.0%} of the responses are rewarded for an answer that repeats a part of the prompt."),
    ),
    "components": ("components", _components),
    "dead-experts": ("dead_experts_limit", _beyond(gt, "{:.3g} experts get no token of an update.")),
    "critic": ("explained_variance_floor", _critic),
    "engines": ("engines_floor", _engines),
    "failures": ("failed_limit", _failures),
}


class HealthMonitor:
    """Checks of every step's record; a failing check raises an alarm if it passed in the `window` records before."""

    def __init__(self, settings: HealthConfig) -> None:
        self.alarms: list[Alarm] = []
        self._settings, self._courses = settings, _Courses(settings.window)
        self._seen: dict[str, int] = {}  # check -> number of the record in which it failed last
        self._count = 0

    def add(self, step: int, record: Record) -> Sequence[Alarm]:
        """Add a record and return the alarms that begin with it."""
        self._courses.add(record)
        self._count += 1
        new = []
        for name, (setting, check) in CHECKS.items():
            keys, limit = self._courses.watched.get(name, ()), getattr(self._settings, setting)
            evidence = check(self._courses, limit, *keys) if keys and limit is not None else None
            if evidence is not None:
                if name not in self._seen or self._count - self._seen[name] > self._settings.window:
                    new.append(Alarm(name, step, evidence))
                self._seen[name] = self._count
        self.alarms += new
        return new
