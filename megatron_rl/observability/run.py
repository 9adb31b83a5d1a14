# SPDX-License-Identifier: Apache-2.0
"""A run and its directory: sinks, timers, and the record of a step.

<run_dir>/ metrics.jsonl config.yaml tensorboard/ wandb/ logs/rank<N>.log rollouts/ checkpoints/step_<N>/
           summary.json curves.png status.html stopped.json wandb_id run.lock schedule/
           attempt-<n>/  metrics.jsonl, rollouts/ and config.yaml of steps that were done again
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.distributed.distributed_c10d import Store

from megatron_rl.config.sections import ObservabilityConfig
from megatron_rl.observability.health import HealthMonitor
from megatron_rl.observability.metrics import (
    CONFIG_FILE,
    ROLLOUTS,
    SUMMARY_FILE,
    VALIDATION,
    MetricsFile,
    Sink,
    TensorBoard,
    find_best_responses,
    find_metric,
    format_response,
    has_records,
    is_due,
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
    ProgressDisplay,
    RolloutCount,
    RolloutProgress,
    close_rank_log,
    log_path,
    open_rank_log,
)
from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.observability.status import Positions

STOPPED_FILE = "stopped.json"
_ROOM_BYTES = 1 << 20  # free space that a run needs to begin
_NUM_WARNINGS = 20
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
        run_dir.mkdir(parents=True, exist_ok=True)
        if self.is_writer:  # a full disk or a quota fails here and not in the log
            with tempfile.TemporaryFile(dir=run_dir) as file:
                file.write(bytes(_ROOM_BYTES))
                os.fsync(file.fileno())
        self.log_file = log_path(run_dir, rank)
        self.log = open_rank_log(run_dir, rank)

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
        if settings.status_port is not None:
            from megatron_rl.observability.status import STATUS_FILE, StatusFile, StatusPage

            name, host, port = self.dir.resolve().name, settings.status_host, settings.status_port
            page = StatusPage(name, host, port, now=self._describe_now, positions=positions, records=records)
            add(page)
            add(StatusFile(page, self.dir / STATUS_FILE))
            self.log.info("status page: %s", page.url)
        if settings.wandb != "off":
            from megatron_rl.observability.wandb_run import WandbRun

            add(WandbRun(self.dir, settings, self._config_yaml, self._total_steps))
        if settings.tensorboard:
            add(TensorBoard(self.dir, after_step, settings.histograms_every))
        self._display = ProgressDisplay(self._pace)
        add(self._display)
        replace_text(self.dir / CONFIG_FILE, self._config_yaml)

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
        if self.is_writer and self._settings.tensorboard and is_due(step, self._settings.histograms_every):
            values = describe()
            for sink in self._sinks:
                sink.histograms(step, values)

    def follow_rollouts(self, store: Store) -> RolloutProgress:
        """Return a counter of generated responses; `store` is shared by all ranks."""
        return RolloutProgress(store, self._show_rollout if self.is_writer else None)

    def _show_rollout(self, count: RolloutCount | None) -> None:
        self._rollout, display = count, self._display
        if display is not None:
            display.show_rollout("validation" if "validation" in self.timers.phases else "rollout", count)

    def _describe_now(self) -> dict[str, Any]:
        """Return the status page's data that change within a step (phase, times, warnings), and the config."""
        from megatron_rl.observability.status import read_warnings

        phase, seconds = self.timers.current()
        pace, rollout = self._pace, self._rollout
        return {
            "step": pace.done,
            "total_steps": pace.total,
            "phase": phase,
            "phase_seconds": seconds,
            "elapsed_seconds": pace.elapsed,
            "remaining_seconds": pace.remaining,
            "rollout": rollout and asdict(rollout),
            "warnings": read_warnings(self.log_file, _NUM_WARNINGS),
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
        """Return True, and store the value, if the named metric is the highest so far.

        Raises:
            UserError: `metrics` lacks the metric.
        """
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

    def close(self) -> None:
        """Close everything; errors are only logged, so that they do not replace the error that ends a run."""
        while self._sinks or self._writing:
            try:
                self.settle()
                self._close_sinks()
            except Exception as error:
                self.log.warning("after the error that ends the run: %s: %s", type(error).__name__, error)
        self._writer.shutdown()
        close_rank_log(self.log)

    def _close_sinks(self) -> None:
        """Close the sinks in reverse order: the last one opened may hold the terminal."""
        while self._sinks:
            self._sinks.pop().close()
