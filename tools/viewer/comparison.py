# SPDX-License-Identifier: Apache-2.0
"""Comparison of runs by config.yaml and metrics.jsonl: differences, and curves in one plot."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from megatron_rl.observability.curves import STYLE, read_points
from megatron_rl.observability.metrics import CONFIG_FILE, Record, read_metrics, step_of
from megatron_rl.types import UserError

_COLOURS = ("#3b6fb6", "#e08a2b", "#3f9c6b", "#c8504b", "#8064a2", "#8d6e63", "#5b6472", "#d3739a")
_COLUMNS = 2
# Metrics that differ between equal runs: times and machine load.
_OF_THE_MACHINE = ("time/", "memory/", "tokens/per_second", "throughput/", "mfu/", "schedule/engine_busy")
_OF_THE_MACHINE += ("agents/environment_seconds", "agents/wait_share")
_WHERE = "trainer.run_dir"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # absent from builds of PyYAML without its C part
_SECTION = re.compile(r"^(?=\w)", re.MULTILINE)
Runs = Mapping[str, Sequence[Path]]  # label -> run directories


def describe_comparison(runs: Runs) -> str:
    """Format the settings that differ, and the first step at which each run differs from the first run.

    Raises:
        UserError: a run without metrics.
    """
    names = [
        label if len(directories) == 1 else f"{label}[{number}]"
        for label, directories in runs.items()
        for number in range(len(directories))
    ]
    found = [directory for directories in runs.values() for directory in directories]
    lines = [
        f"{key}: " + ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
        for key, values in find_differences([read_settings(directory) for directory in found]).items()
    ]
    lines = ["settings that differ:", *(f"  {line}" for line in lines or ["none"])]
    records = [read_metrics(directory) for directory in found]
    for name, other in zip(names[1:], records[1:], strict=True):
        lines.append(f"{name} against {names[0]}: {_describe_difference(records[0], other)}")
    return "\n".join(lines)


def read_settings(directory: Path) -> dict[str, Any]:
    """Return the values of a run's config.yaml by `section.key`; empty without one."""
    path = directory / CONFIG_FILE
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return {name: value for section in _SECTION.split(text) for name, value in _read_section(section)}


@cache  # runs share most sections, and parsing takes most of the time of a table of runs
def _read_section(text: str) -> tuple[tuple[str, Any], ...]:
    return tuple(_flatten(yaml.load(text, _LOADER) or {}, ""))


def _flatten(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def find_differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings that are not equal in all of the configs, each with its values, "-" if missing."""
    if not configs:
        return {}
    keys = sorted({key for config in configs for key in config} - {_WHERE})
    values = {key: [config.get(key, "-") for config in configs] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def _describe_difference(first: Sequence[Record], other: Sequence[Record]) -> str:
    """Describe the first differing step and its metrics; of a repeated step, the last record counts."""
    mine, theirs = ({step_of(record): record for record in records} for records in (first, other))
    common = sorted(mine.keys() & theirs.keys())
    for step in common:
        keys = sorted(mine[step].keys() | theirs[step].keys())
        different = [
            key for key in keys if not key.startswith(_OF_THE_MACHINE) and mine[step].get(key) != theirs[step].get(key)
        ]
        if different:
            key = different[0]
            more = f" and {len(different) - 1} more metrics" if len(different) > 1 else ""
            return f"step {step} is the first that differs: {key} {mine[step].get(key)}, {theirs[step].get(key)}{more}"
    return f"all {len(common)} common steps are equal to the last bit"


def plot_comparison(runs: Runs, metrics: Sequence[str], path: Path) -> None:
    """Plot runs over each other; runs of one label as mean and range.

    Args:
        metrics: keys of metrics.jsonl, one panel each.

    Raises:
        UserError: a run without metrics, or a metric that no run has.
    """
    import matplotlib
    from matplotlib.figure import Figure

    records = {label: [read_metrics(directory) for directory in of] for label, of in runs.items()}
    known = sorted({key for seeds in records.values() for run in seeds for record in run for key in record} - {"step"})
    for key in metrics:
        if key not in known:
            raise UserError(
                f"no run has the metric {key!r}",
                source="metrics.jsonl of the runs",
                expected=f"one of {', '.join(known)}",
                hint="check the spelling",
            )
    rows = math.ceil(len(metrics) / _COLUMNS)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.5 * min(len(metrics), _COLUMNS), 3.5 * rows), dpi=130, layout="constrained")
        panels = figure.subplots(rows, min(len(metrics), _COLUMNS), squeeze=False).flat
        for axes, key in zip(panels, metrics):
            axes.set_title(key)
            axes.set_xlabel("step")
            for number, (label, seeds) in enumerate(records.items()):
                _draw_label(axes, [read_points(run, key) for run in seeds], _COLOURS[number % len(_COLOURS)], label)
            axes.legend(loc="best")
        for axes in panels:  # unused panels
            axes.set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _draw_label(axes: Any, seeds: Sequence[tuple[list[int], list[float]]], color: str, label: str) -> None:
    """Draw the mean and the range over the seeds that have a step."""
    at: dict[int, list[float]] = {}
    for steps, values in seeds:
        for step, value in zip(steps, values, strict=True):
            at.setdefault(step, []).append(value)
    if not at:
        return
    steps, found = zip(*sorted(at.items()), strict=True)
    name = label if len(seeds) == 1 else f"{label} ({len(seeds)} runs)"
    marker = "o" if len(steps) < 15 else None
    axes.plot(steps, [fmean(values) for values in found], color=color, lw=1.8, marker=marker, ms=4, label=name)
    if len(seeds) > 1:
        low, high = [min(values) for values in found], [max(values) for values in found]
        axes.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)
