# SPDX-License-Identifier: Apache-2.0
"""What is drawn is not looked at, only that every run and metric is there and that bad input is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.observability.comparison import plot_comparison
from megatron_rl.types import UserError


def write_run(directory: Path, **metrics: float) -> Path:
    directory.mkdir()
    rows = [{"step": step, **{name: value * step for name, value in metrics.items()}} for step in range(3)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_picture_of_two_runs(tmp_path: Path) -> None:
    runs = {"a": write_run(tmp_path / "a", reward=1.0), "b": write_run(tmp_path / "b", reward=2.0, loss=1.0)}
    plot_comparison(runs, ["reward", "loss", "reward"], tmp_path / "new" / "out.png")
    assert (tmp_path / "new" / "out.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_metric_and_missing_run(tmp_path: Path) -> None:
    runs = {"a": write_run(tmp_path / "a", reward=1.0)}
    with pytest.raises(UserError, match="no run has the metric 'lost'"):
        plot_comparison(runs, ["lost"], tmp_path / "out.png")
    with pytest.raises(UserError, match="there is no"):
        plot_comparison({"b": tmp_path / "b"}, ["reward"], tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()
