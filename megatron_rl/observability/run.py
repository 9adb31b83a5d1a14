# SPDX-License-Identifier: Apache-2.0
"""A run and its directory: what is written where, and what a step's record consists of.

    <run_dir>/ metrics.jsonl config.yaml tensorboard/ logs/rank<N>.log rollouts/ checkpoints/step_<N>/
               summary.json curves.png stopped.json
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.observability.curves import plot_curves
from megatron_rl.observability.metrics import MetricsSink, SinkSettings, has_records, read_metrics
from megatron_rl.observability.rank_log import close_rank_log, log_path, open_rank_log
from megatron_rl.observability.summary import SUMMARY_FILE, write_summary
from megatron_rl.observability.timers import PhaseTimers
from megatron_rl.types import UserError

STOPPED_FILE = "stopped.json"
# Of several optimizer steps in one step only the first starts from the policy that was sampled.
_FIRST_ONLY = ("policy/ratio_max_deviation",)


class Run:
    """Sinks and timers of one run; rank 0 writes, every rank keeps its own log.

    Building one makes the directory and the log; `start` opens the rest and changes what is there.

    Args:
        run_dir: the directory; made if missing.
        config_yaml: the resolved config, written to config.yaml.
        total_steps: for the progress bar and the console line.
        settings: observability section.
        rank: this rank.

    Attributes:
        best_value: of `trainer.best_metric` so far.
    """

    def __init__(
        self, run_dir: Path, config_yaml: str, total_steps: int, settings: SinkSettings, rank: int
    ) -> None:
        self.dir, self.is_writer, self.timers = run_dir, rank == 0, PhaseTimers()
        self.best_value = float("-inf")
        self._config_yaml, self._total_steps, self._settings = config_yaml, total_steps, settings
        self._counts: dict[str, list[float]] = {}
        self._sink: MetricsSink | None = None
        run_dir.mkdir(parents=True, exist_ok=True)
        self.log_file = log_path(run_dir, rank)
        self.log = open_rank_log(run_dir, rank)

    @property
    def is_finished(self) -> bool:
        """True if a run has come to its end in this directory."""
        return (self.dir / SUMMARY_FILE).exists()

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.dir / "checkpoints"

    def start(self, after_step: int | None) -> None:
        """Open the sinks.

        Args:
            after_step: go on with the run that is there, after this step (-1: from its beginning); what it wrote about
                later steps is dropped. None: a new run.

        Raises:
            UserError: (rank 0) the directory holds another run's metrics.
        """
        if self.is_writer:
            rollouts = self.dir / "rollouts"
            rollouts.mkdir(exist_ok=True)
            for path in rollouts.glob("step_*.jsonl") if after_step is not None else ():
                if int(path.stem.removeprefix("step_")) > after_step:
                    path.unlink()
            for name in (STOPPED_FILE, SUMMARY_FILE):
                (self.dir / name).unlink(missing_ok=True)
        self._sink = MetricsSink(
            self.dir, self._total_steps, self._settings, self.is_writer, after_step=after_step)
        if self.is_writer:
            (self.dir / "config.yaml").write_text(self._config_yaml)

    def count(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the step's record; what is counted several times is averaged."""
        for name, value in metrics.items():
            self._counts.setdefault(name, []).append(float(value))

    def counted(self) -> dict[str, float]:
        """What the record of this step has so far, without its times."""
        return {
            name: values[0] if name in _FIRST_ONLY else sum(values) / len(values)
            for name, values in self._counts.items()
        }

    def record(self, step: int) -> None:
        """Write the record of one step: what was counted, and the seconds of its phases."""
        metrics = self.counted()
        self._counts = {}
        seconds = self.timers.pop()
        tokens = metrics.get("tokens/prompt", 0.0) + metrics.get("tokens/response", 0.0)
        if tokens and seconds.get("time/step"):
            metrics["tokens/per_second"] = tokens / seconds["time/step"]
        self._sink.log(step, {**metrics, **seconds})

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rollouts of a step, one JSON object per line."""
        if self.is_writer:
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            (self.dir / "rollouts" / f"step_{step}.jsonl").write_text("".join(lines), encoding="utf-8")

    def last_recorded_step(self) -> int:
        """Step of the last record in metrics.jsonl; -1 without one (the writer's rank only)."""
        return int(read_metrics(self.dir)[-1]["step"]) if has_records(self.dir) else -1

    def note_stop(self, content: Mapping[str, Any]) -> None:
        """Write stopped.json: the run was asked to stop and is to be started again; the next start removes it."""
        if self.is_writer:
            (self.dir / STOPPED_FILE).write_text(json.dumps(content) + "\n")

    def is_best(self, metrics: Mapping[str, float], name: str | None) -> bool:
        """True if the metric of that name is higher than ever before in this run; it is remembered.

        Raises:
            UserError: the metric is not among them.
        """
        if name is None:
            return False
        if name not in metrics:
            raise UserError(f"no metric {name!r} was measured", source="trainer.best_metric",
                            expected=f"one of {', '.join(sorted(metrics))}", hint="name one of them")
        if metrics[name] <= self.best_value:
            return False
        self.best_value = metrics[name]
        return True

    def finish(self) -> None:
        """Close the sinks; write the summary and the curves and say where they are."""
        self._sink.close()
        if self.is_writer:
            summary = write_summary(self.dir)
            for name, course in json.loads(summary.read_text())["validation"].items():
                self.log.info("%s accuracy: %.4f at step %d -> %.4f at step %d (best %.4f)", name, course["first"],
                              course["first_step"], course["last"], course["last_step"], course["best"])
            self.log.info("summary: %s", summary)
            self.log.info("curves:  %s", plot_curves(self.dir))

    def close(self) -> None:
        """Close what is open (also after an error)."""
        if self._sink is not None:
            self._sink.close()
        close_rank_log(self.log)
