# SPDX-License-Identifier: Apache-2.0
"""curves.png of a run, drawn from metrics.jsonl in four panels: reward, validation, distances of policies, seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.observability.metrics import ROWS, Record, accuracy_set, phase_seconds, read_metrics, step_of

CURVES_FILE = "curves.png"
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _GREY = "#3b6fb6", "#e08a2b", "#3f9c6b", "#c8504b", "#8064a2", "#c9ccd1"
_SETS, _DISTANCES = (_ORANGE, _GREEN, _PURPLE, _RED, _BLUE), (_GREEN, _PURPLE, _RED, _BLUE, _ORANGE)
# Phases in the order of a step; a phase has the same color in every picture.
_PHASES = {
    "reshard": "#7fb7d8",
    "rollout": _BLUE,
    "reward": _ORANGE,
    "old_logprobs": "#9bd0a6",
    "ref_logprobs": "#5fae86",
    "values": "#b39bc8",
    "update_critic": "#8064a2",
    "update": _RED,
    "validation": "#e8c15a",
    "save": "#8d6e63",
}
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "axes.axisbelow": True,
    "axes.edgecolor": "#8a8f98",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def plot_curves(run_dir: Path) -> Path:
    """Draw curves.png of a run directory and return its path (UserError: metrics.jsonl is missing or unreadable)."""
    import matplotlib
    from matplotlib.figure import Figure

    records = read_metrics(run_dir)
    path = Path(run_dir) / CURVES_FILE
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 7), dpi=130, layout="constrained")
        panels = figure.subplots(2, 2).flat
        for axes, draw in zip(panels, (_draw_reward, _draw_validation, _draw_distance, _draw_seconds), strict=True):
            draw(axes, records)
            if not axes.has_data():
                axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="#8a8f98")
                axes.set_yticks([])
            axes.set_xlabel("step")
            axes.xaxis.get_major_locator().set_params(integer=True)
        figure.savefig(path)
    return path


def read_points(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of metric `key`, without records that lack it."""
    pairs = [(step_of(record), record[key]) for record in records if record.get(key) is not None]
    return [step for step, _ in pairs], [float(value or 0.0) for _, value in pairs]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return for each value the mean of the last `window` values, fewer at the beginning."""
    tails = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(tail) / len(tail) for tail in tails]


def _draw_reward(axes: Any, records: Sequence[Record]) -> None:
    axes.set_title("Training reward (mean)")
    steps, values = read_points(records, "reward/mean")
    if not steps:
        return
    window = max(1, len(values) // 20)
    if window == 1:
        axes.plot(steps, values, color=_BLUE, lw=2, marker="o", ms=4)
        return
    axes.plot(steps, values, color=_BLUE, alpha=0.3, lw=1)
    axes.plot(steps, smooth(values, window), color=_BLUE, lw=2, label=f"mean of {window} steps")
    axes.legend(loc="best")


def _draw_validation(axes: Any, records: Sequence[Record]) -> None:
    axes.set_title("Validation accuracy")
    keys = sorted({key for record in records for key in record if accuracy_set(key)})
    if not keys:
        return
    above = {"textcoords": "offset points", "ha": "center", "fontsize": 9}
    for index, key in enumerate(keys):
        steps, values = read_points(records, key)
        color = _SETS[index % len(_SETS)]
        axes.plot(steps, values, color=color, lw=2, marker="o", ms=5, label=accuracy_set(key))
        for step, value in {(steps[0], values[0]), (steps[-1], values[-1])} if steps else ():
            axes.annotate(f"{value:.3f}", (step, value), xytext=(0, 7), color=color, **above)
    axes.margins(y=0.15)
    axes.legend(loc="best")


def _draw_distance(axes: Any, records: Sequence[Record]) -> None:
    axes.set_title("KL and rollout mismatch")
    drawn = []
    for index, metric in enumerate(metric for metric in ROWS if metric.curve):
        steps, values = read_points(records, metric.name)
        if any(values):  # the KL of a run without a reference is 0 at every step
            axes.plot(steps, values, color=_DISTANCES[index % len(_DISTANCES)], lw=1.8, label=metric.curve)
            drawn += values
    if not drawn:
        return
    smallest = min((value for value in drawn if value > 0), default=1e-8)
    axes.set_yscale("symlog", linthresh=smallest) if min(drawn) <= 0 else axes.set_yscale("log")
    axes.legend(loc="best")


def _draw_seconds(axes: Any, records: Sequence[Record]) -> None:
    axes.set_title("Seconds per step")
    timed = [(step_of(record), phase_seconds(record), record.get("time/step")) for record in records]
    timed = [entry for entry in timed if entry[0] > 0 and (entry[1] or entry[2] is not None)]
    if not timed:
        return
    found = {name for _, phases, _ in timed for name in phases}
    names = [name for name in _PHASES if name in found] + sorted(found - set(_PHASES))
    steps = [step for step, _, _ in timed]
    layers = [[phases.get(name, 0.0) for _, phases, _ in timed] for name in names]
    rest = [max(0.0, (whole or 0.0) - sum(phases.values())) for _, phases, whole in timed]
    base = [0.0] * len(steps)
    for name, layer in zip([*names, "other"], [*layers, rest], strict=True):
        if not any(layer):
            continue
        axes.bar(steps, layer, bottom=base, width=1.0, color=_PHASES.get(name, _GREY), label=name, linewidth=0)
        base = [low + high for low, high in zip(base, layer, strict=True)]
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
