# SPDX-License-Identifier: Apache-2.0
"""The other trackers with their real packages, if they are installed, without a network.

Not covered: servers, uploads and web pages.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config.schema import ObservabilityConfig
from megatron_rl.observability.metrics import NumberRecord
from megatron_rl.observability.trackers import TRACKERS, Tracker
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from pathlib import Path
from megatron_rl.config.schema import ObservabilityConfig
from megatron_rl.observability.run import Run

name, first, last = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
run = Run(Path(sys.argv[1]), "actor: {lr: 0.001}", 3, ObservabilityConfig(trackers=[name]), 0)
run.start(first - 1 if first > 1 else None)
for step in range(first, last + 1):
    run.count({"reward/mean": step / 8, "validation/toy/pass@4": 0.5, "kl/mean": float("nan")})
    run.record(step)
run.close()
"""
READERS = {
    "mlflow": """
import json, sys, mlflow
mlflow.set_tracking_uri(f"sqlite:///{sys.argv[1]}/run/mlflow.db")
client = mlflow.MlflowClient()
[run] = client.search_runs([client.get_experiment_by_name("megatron_rl").experiment_id])
points = client.get_metric_history(run.info.run_id, "reward/mean")
keys = sorted(run.data.metrics)
print(json.dumps([run.info.status, keys, [[p.step, p.value] for p in points]]))
""",
}


def call(*arguments: str, **more: str) -> str:
    """Run Python in a process of its own, and return its output."""
    import os

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **more}
    done = subprocess.run(
        [sys.executable, "-c", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def is_installed(name: str) -> bool:
    """Return whether a tracker's package is there."""
    return importlib.util.find_spec(name) is not None


if is_installed("mlflow"):

    def test_mlflow_has_all_steps_of_a_run_that_continues(tmp_path: Path) -> None:
        for first, last in ((1, 2), (3, 3)):
            call(PROGRAM, str(tmp_path / "run"), "mlflow", str(first), str(last))
        status, keys, points = json.loads(call(READERS["mlflow"], str(tmp_path)).splitlines()[-1])
        assert status == "FINISHED" and {"reward/mean", "validation/toy/pass_4"} <= {*keys}
        assert points == [[1, 0.125], [2, 0.25], [3, 0.375]]


if is_installed("trackio"):

    def test_trackio_writes_a_run(tmp_path: Path) -> None:
        call(PROGRAM, str(tmp_path / "run"), "trackio", "1", "3", TRACKIO_DIR=str(tmp_path / "trackio"))
        read = "import sqlite3, sys; print([*sqlite3.connect(sys.argv[1]).execute('select metrics from metrics')])"
        [file] = (tmp_path / "trackio").glob("*.db")
        assert "0.375" in call(read, str(file))


if is_installed("swanlab"):

    def test_swanlab_writes_a_run(tmp_path: Path) -> None:
        call(PROGRAM, str(tmp_path / "run"), "swanlab", "1", "3")
        assert any(path.stat().st_size > 200 for path in (tmp_path / "run/swanlog").rglob("*") if path.is_file())


class Recorded(Tracker):
    """Tracker that keeps its records, and fails from step 3 on."""

    title = "Recorded"

    def open(self, run_dir: Path, config: object) -> list[object]:
        return [self.name, self.project, config]

    def send(self, step: int, record: NumberRecord) -> None:
        if step == 3:
            raise OSError("the server is gone")
        self.library.append((step, dict(record)))

    def end(self, has_failed: bool) -> None:
        self.library.append(has_failed)


@pytest.mark.parametrize(("last", "has_failed"), [(1, True), (2, False)])
def test_a_tracker_is_closed_once_with_its_outcome(tmp_path: Path, last: int, has_failed: bool) -> None:
    tracker = Recorded(tmp_path / "sums", ObservabilityConfig(), "actor: {lr: 1}", 2)
    kept = tracker.library
    for step in range(1, last + 1):
        tracker.log(step, {"a": float(step)})
    tracker.close()
    tracker.close()
    assert kept == [
        "sums",
        "megatron_rl",
        {"actor": {"lr": 1}},
        *[(s, {"a": float(s)}) for s in range(1, last + 1)],
    ] + [has_failed]


def test_a_run_goes_on_without_a_tracker_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recorded(tmp_path, ObservabilityConfig(), "", 9)
    kept = tracker.library
    for step in range(2, 6):
        tracker.log(step, {"a": math.inf})
    tracker.close()
    assert kept[3:] == [(2, {"a": math.inf})] and caplog.text.count("Recorded gets no more metrics") == 1


def test_a_tracker_that_is_not_there_is_refused_before_the_run() -> None:
    settings = ["model.path=m", "data.train_files=[x]", "observability.trackers=[abacus]"]
    with pytest.raises(UserError, match=r"observability.trackers = \['abacus'\] \(list\) is not accepted"):
        load_config(None, settings)
    assert set(TRACKERS) == {"wandb", "wandb-offline", "mlflow", "trackio", "swanlab"}
