# SPDX-License-Identifier: Apache-2.0
"""A run and its directory: what is written where, and what a step's record consists of.

    <run_dir>/ metrics.jsonl config.yaml tensorboard/ logs/rank<N>.log rollouts/ checkpoints/step_<N>/
               summary.json curves.png
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.observability.curves import plot_curves
from megatron_rl.observability.metrics import MetricsSink, SinkSettings
from megatron_rl.observability.rank_log import close_rank_log, open_rank_log
from megatron_rl.observability.summary import write_summary
from megatron_rl.observability.timers import PhaseTimers
from megatron_rl.types import UserError

# Of several optimizer steps in one step only the first starts from the policy that was sampled.
_FIRST_ONLY = ("policy/ratio_max_deviation",)


class Run:
    """Sinks and timers of one run; rank 0 writes, every rank keeps its own log.

    Args:
        run_dir: the directory; made if missing.
        config_yaml: the resolved config, written to config.yaml.
        total_steps: for the progress bar and the console line.
        settings: observability section.
        rank: this rank.

    Raises:
        UserError: (rank 0) the directory holds another run's metrics.
    """

    def __init__(
        self, run_dir: Path, config_yaml: str, total_steps: int, settings: SinkSettings, rank: int
    ) -> None:
        self.dir, self.is_writer, self.timers = run_dir, rank == 0, PhaseTimers()
        self.best_value = float("-inf")
        self._counts: dict[str, list[float]] = {}
        run_dir.mkdir(parents=True, exist_ok=True)
        self._sink = MetricsSink(run_dir, total_steps, settings, self.is_writer)
        self.log = open_rank_log(run_dir, rank)
        if self.is_writer:
            (run_dir / "config.yaml").write_text(config_yaml)
            (run_dir / "rollouts").mkdir(exist_ok=True)

    def checkpoint_dir(self, step: int) -> Path:
        """Where the checkpoint of a step belongs."""
        return self.dir / "checkpoints" / f"step_{step}"

    def count(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the step's record; what is counted several times is averaged."""
        for name, value in metrics.items():
            self._counts.setdefault(name, []).append(float(value))

    def record(self, step: int) -> None:
        """Write the record of one step: what was counted, and the seconds of its phases."""
        metrics = {
            name: values[0] if name in _FIRST_ONLY else sum(values) / len(values)
            for name, values in self._counts.items()
        }
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

    def point_at(self, name: str, step: int) -> None:
        """Make `checkpoints/<name>` ("latest", "best") a link to the finished checkpoint of a step."""
        if self.is_writer:
            link, temporary = self.dir / "checkpoints" / name, self.dir / "checkpoints" / f".{name}"
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(f"step_{step}")
            temporary.replace(link)

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
        self._sink.close()
        close_rank_log(self.log)
