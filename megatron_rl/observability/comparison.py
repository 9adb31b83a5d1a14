# SPDX-License-Identifier: Apache-2.0
"""Several runs in one picture: a panel per metric, a line per run. Drawn from the runs' metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.observability.curves import STYLE, read_points
from megatron_rl.observability.metrics import read_metrics
from megatron_rl.types import UserError

_COLOURS = ("#3b6fb6", "#e08a2b", "#3f9c6b", "#c8504b", "#8064a2", "#8d6e63", "#5b6472", "#d3739a")
_COLUMNS = 2


def plot_comparison(runs: Mapping[str, Path], metrics: Sequence[str], path: Path) -> None:
    """Draw runs over each other.

    Args:
        runs: label -> run directory.
        metrics: keys of metrics.jsonl, one panel each; a run without one has no line there.
        path: the picture to write.

    Raises:
        UserError: a run without metrics, or a metric that no run has.
    """
    import matplotlib
    from matplotlib.figure import Figure

    records = {label: read_metrics(directory) for label, directory in runs.items()}
    known = sorted({key for run in records.values() for record in run for key in record} - {"step"})
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
            for number, (label, run) in enumerate(records.items()):
                steps, values = read_points(run, key)
                if steps:
                    marker = "o" if len(steps) < 15 else None
                    axes.plot(
                        steps, values, color=_COLOURS[number % len(_COLOURS)], lw=1.8, marker=marker, ms=4, label=label
                    )
            axes.legend(loc="best")
        for axes in panels:  # what the last row does not need
            axes.set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
