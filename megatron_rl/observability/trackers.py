# SPDX-License-Identifier: Apache-2.0
"""The metrics of a run in the experiment trackers of `observability.trackers` except TensorBoard.

Without a server of the user's, named by the tracker's own variables, all but W&B write below the run directory or at
their usual place on this machine, and open no connection.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import uuid
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.sections import ObservabilityConfig
from megatron_rl.observability.metrics import NumberRecord, Sink, replace_text
from megatron_rl.types import UserError


class Tracker(Sink):
    """Sink of one tracker, whose `title` stands in messages; a run continues without one that fails.

    Args:
        total_steps: a run that ends before this step has failed.
    """

    title = ""

    def __init__(self, run_dir: Path, settings: ObservabilityConfig, config_yaml: str, total_steps: int) -> None:
        self.project, self.name = settings.wandb_project, settings.wandb_name or run_dir.resolve().name
        self.settings, self._total_steps, self._has_failed = settings, total_steps, True
        self.library: Any = self.open(run_dir, yaml.safe_load(config_yaml) or {})

    @abstractmethod
    def open(self, run_dir: Path, config: Mapping[str, Any]) -> Any:
        """Begin or continue the run of a directory, and return the object that `send` and `end` use."""

    @abstractmethod
    def send(self, step: int, record: NumberRecord) -> None:
        """Pass a record to the tracker."""

    @abstractmethod
    def end(self, has_failed: bool) -> None:
        """Write buffered data and end the run."""

    def log(self, step: int, record: NumberRecord) -> None:
        """Log the metrics; after a failure the run continues without the tracker, with a warning."""
        if self.library is None:
            return
        self._has_failed = step < self._total_steps
        try:
            self.send(step, record)
        except Exception as error:  # its process or server is gone; metrics.jsonl has all records
            logging.getLogger(__name__).warning("%s gets no more metrics of this run: %s", self.title, error)
            self.library = None

    def close(self) -> None:
        """End the run; may be called again."""
        if self.library is not None:
            self.end(self._has_failed)
            self.library = None


class WandbRun(Tracker):
    """Run of a W&B project, online unless WANDB_MODE or `wandb-offline` says otherwise.

    Offline it writes files below <run_dir>/wandb and opens no connection.
    A restarted run continues under the id in <run_dir>/wandb_id and logs repeated steps again; the axis of every chart
    is the metric `step`.
    """

    title = "Weights & Biases"

    def open(self, run_dir: Path, config: Mapping[str, Any]) -> Any:
        """Begin or continue the run (UserError if W&B refuses the login)."""
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # read at import; else wandb sends its own traces, even offline
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")  # else wandb advertises another package
        import wandb
        from wandb.errors import Error

        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            replace_text(id_file, uuid.uuid4().hex[:12] + "\n")
        try:
            run = wandb.init(
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                project=self.project,
                name=self.name,
                dir=str(run_dir),
                mode="offline" if "wandb-offline" in self.settings.trackers else None,
                config=dict(config),
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True, force=True
                ),
            )
        except Error as error:
            raise UserError(
                f"Weights & Biases does not start: {error}",
                source="observability.trackers",
                expected="a machine that is logged in",
                hint="run `wandb login`, or list wandb-offline instead of wandb",
            ) from error
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def send(self, step: int, record: NumberRecord) -> None:
        """Log the metrics."""
        self.library.log({"step": step, **record})

    def alarm(self, step: int, name: str, text: str) -> None:
        """Send an alert; W&B suppresses a second one of the same title for a minute."""
        if self.library is not None:
            self.library.alert(title=f"health: {name}", text=f"step {step}: {text}")

    def end(self, has_failed: bool) -> None:
        """Write buffered data; if online, wait for the upload."""
        self.library.finish(exit_code=int(has_failed))


class Mlflow(Tracker):
    """MLflow: the server of MLFLOW_TRACKING_URI, or <run_dir>/mlflow.db with files in <run_dir>/mlartifacts."""

    title = "MLflow"

    def open(self, run_dir: Path, config: Mapping[str, Any]) -> Any:
        """Begin a run, or continue the one whose id is in <run_dir>/mlflow_id."""
        mlflow, known = importlib.import_module("mlflow"), run_dir / "mlflow_id"
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{run_dir.resolve()}/mlflow.db")
            if mlflow.get_experiment_by_name(self.project) is None:
                mlflow.create_experiment(self.project, (run_dir.resolve() / "mlartifacts").as_uri())
        mlflow.set_experiment(self.project)
        run_id = known.read_text(encoding="utf-8").strip() if known.exists() else None
        run = mlflow.start_run(run_id=run_id, run_name=None if run_id else self.name, log_system_metrics=False)
        if run_id is None:
            replace_text(known, run.info.run_id + "\n")
            mlflow.log_dict(dict(config), "config.yaml")
        return mlflow

    def send(self, step: int, record: NumberRecord) -> None:
        """Log the metrics; MLflow accepts no "@" and the like in a name."""
        self.library.log_metrics(
            {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in record.items()}, step=step
        )

    def end(self, has_failed: bool) -> None:
        """End the run with its status."""
        self.library.end_run("FAILED" if has_failed else "FINISHED")


class Trackio(Tracker):
    """Trackio, which writes to its own directory on this machine (TRACKIO_DIR)."""

    title = "Trackio"

    def open(self, run_dir: Path, config: Mapping[str, Any]) -> Any:
        """Begin or continue the run of this name."""
        trackio = importlib.import_module("trackio")
        trackio.init(project=self.project, name=self.name, config=dict(config), resume="allow", embed=False)
        return trackio

    def send(self, step: int, record: NumberRecord) -> None:
        """Log the metrics."""
        self.library.log(dict(record), step=step)

    def end(self, has_failed: bool) -> None:
        """End the run."""
        self.library.finish()


class Swanlab(Tracker):
    """SwanLab: files in <run_dir>/swanlog, or elsewhere by SWANLAB_MODE."""

    title = "SwanLab"

    def open(self, run_dir: Path, config: Mapping[str, Any]) -> Any:
        """Begin a run."""
        swanlab = importlib.import_module("swanlab")
        swanlab.init(
            project=self.project,
            name=self.name,
            config=dict(config),
            log_dir=str(run_dir / "swanlog"),
            mode=os.environ.get("SWANLAB_MODE", "offline"),
        )
        return swanlab

    def send(self, step: int, record: NumberRecord) -> None:
        """Log the metrics."""
        self.library.log(dict(record), step=step)

    def end(self, has_failed: bool) -> None:
        """End the run with its status."""
        self.library.finish(**({"state": "crashed", "error": "it ended before its last step"} if has_failed else {}))


TRACKERS: dict[str, type[Tracker]] = {
    "wandb": WandbRun,
    "wandb-offline": WandbRun,
    "mlflow": Mlflow,
    "trackio": Trackio,
    "swanlab": Swanlab,
}
