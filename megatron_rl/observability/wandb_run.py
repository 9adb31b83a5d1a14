# SPDX-License-Identifier: Apache-2.0
"""The run in Weights & Biases, if `observability.wandb` enables it.

A restarted run continues under the id in <run_dir>/wandb_id and logs repeated steps again; the axis of every chart is
the metric `step`.
"""

from __future__ import annotations

import logging
import os
import uuid
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.sections import ObservabilityConfig
from megatron_rl.observability.metrics import NumberRecord, Sink, replace_text
from megatron_rl.types import UserError

ID_FILE = "wandb_id"


class WandbRun(Sink):
    """Sink for one run of a W&B project; offline it writes files below <run_dir>/wandb and opens no connection.

    Args:
        total_steps: a run that ends before this step is marked as failed.

    Raises:
        UserError: W&B refuses the login.
    """

    def __init__(self, run_dir: Path, settings: ObservabilityConfig, config_yaml: str, total_steps: int) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # read at import; else wandb sends its own traces, even offline
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")  # else wandb advertises another package
        import wandb
        from wandb.errors import Error

        assert settings.wandb != "off"
        id_file = run_dir / ID_FILE
        if not id_file.exists():
            replace_text(id_file, uuid.uuid4().hex[:12] + "\n")
        try:
            self._run: Any = wandb.init(
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                project=settings.wandb_project,
                name=settings.wandb_name or run_dir.resolve().name,
                dir=str(run_dir),
                mode=settings.wandb,
                config=yaml.safe_load(config_yaml) or {},
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True, force=True
                ),
            )
        except Error as error:
            raise UserError(
                f"Weights & Biases does not start: {error}",
                source=f"observability.wandb={settings.wandb}",
                expected="a machine that is logged in",
                hint="run `wandb login`, or set observability.wandb=offline",
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._total_steps, self._exit_code = total_steps, 1

    def log(self, step: int, record: NumberRecord) -> None:
        """Log the metrics; after a failure the run continues without W&B, with a warning."""
        if self._run is None:
            return
        self._exit_code = int(step < self._total_steps)
        try:
            self._run.log({"step": step, **record})
        except Exception as error:  # wandb's process is gone; metrics.jsonl has all records
            logging.getLogger(__name__).warning("Weights & Biases gets no more metrics of this run: %s", error)
            self._run = None

    def alarm(self, step: int, name: str, text: str) -> None:
        """Send an alert; W&B suppresses a second one of the same title for a minute."""
        if self._run is not None:
            self._run.alert(title=f"health: {name}", text=f"step {step}: {text}")

    def close(self) -> None:
        """Write buffered data; if online, wait for the upload."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=self._exit_code)
