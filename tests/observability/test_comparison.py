# SPDX-License-Identifier: Apache-2.0
"""Text of the differences between runs, and lines and bands of their picture.

Not covered: the look of the picture.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.types import UserError
from tools.viewer.comparison import describe_comparison, plot_comparison


def write_run(directory: Path, **metrics: float) -> Path:
    directory.mkdir()
    rows = [{"step": step, **{name: value * step for name, value in metrics.items()}} for step in range(3)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_picture_of_two_runs(tmp_path: Path) -> None:
    runs = {"a": [write_run(tmp_path / "a", reward=1.0)], "b": [write_run(tmp_path / "b", reward=2.0, loss=1.0)]}
    plot_comparison(runs, ["reward", "loss", "reward"], tmp_path / "new" / "out.png")
    assert (tmp_path / "new" / "out.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_metric_and_missing_run(tmp_path: Path) -> None:
    runs = {"a": [write_run(tmp_path / "a", reward=1.0)]}
    with pytest.raises(UserError, match="no run has the metric 'lost'"):
        plot_comparison(runs, ["lost"], tmp_path / "out.png")
    with pytest.raises(UserError, match="there is no"):
        plot_comparison({"b": [tmp_path / "b"]}, ["reward"], tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


def test_seeds_are_a_mean_and_a_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: dict[str, list[object]] = {}
    for name in ("plot", "fill_between"):
        monkeypatch.setattr(
            Axes, name, lambda axes, *values, at=name, **style: drawn.setdefault(at, []).append((values, style))
        )
    seeds = [write_run(tmp_path / "a", reward=1.0), write_run(tmp_path / "b", reward=4.0)]
    plot_comparison({"grpo": seeds}, ["reward"], tmp_path / "out.png")
    [((steps, means), style)], [((_, low, high), _)] = drawn["plot"], drawn["fill_between"]
    assert (steps, means, style["label"]) == ((0, 1, 2), [0.0, 2.5, 5.0], "grpo (2 runs)")
    assert (low, high) == ([0.0, 1.0, 2.0], [0.0, 4.0, 8.0])


def test_what_differs(tmp_path: Path) -> None:
    runs = {"a": [write_run(tmp_path / "a", reward=1.0)], "b": [write_run(tmp_path / "b", reward=2.0)]}
    for name, rate in (("a", 0.1), ("b", 0.2)):
        text = f"actor:\n  lr: {rate}\n  lora:\n    rank: 8\ntrainer:\n  run_dir: {name}\n"
        (tmp_path / name / "config.yaml").write_text(text)
    assert describe_comparison(runs).splitlines() == [
        "settings that differ:",
        "  actor.lr: a 0.1, b 0.2",
        "b against a: step 1 is the first that differs: reward 1.0, 2.0",
    ]


def test_equal_runs(tmp_path: Path) -> None:
    """Times are not compared; seeds of a label are numbered."""
    runs = {"a": [write_run(tmp_path / "a", reward=1.0, **{"time/step": 1.0, "schedule/engine_busy": 0.5})]}
    runs["a"].append(write_run(tmp_path / "b", reward=1.0, **{"time/step": 2.0, "schedule/engine_busy": 0.6}))
    assert describe_comparison(runs).splitlines() == [
        "settings that differ:",
        "  none",
        "a[1] against a[0]: all 3 common steps are equal to the last bit",
    ]
