# SPDX-License-Identifier: Apache-2.0
"""Plot of bench_long.py, a panel per question."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.observability.curves import STYLE

Row = dict[str, Any]
_COLOURS = ("#3b6fb6", "#e08a2b", "#3f9c6b", "#c8504b", "#8064a2")
_STYLES = ("-", "--", ":")


def plot_long(rows: Sequence[Row], path: Path) -> None:
    """Draw the panels of the parts that have rows."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_part: dict[str, list[Row]] = {}
    for row in rows:
        by_part.setdefault(row["part"], []).append(row)
    panels = [(draw, by_part[part]) for part, draw in _PANELS if part in by_part]
    columns = min(len(panels), 3)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5 * columns, 3.8 * -(-len(panels) // columns)), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flat
        for (draw, found), panel in zip(panels, axes):
            draw(panel, found)
        for panel in axes:  # unused panels
            panel.set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _draw_lines(axes: Any, rows: list[Row], value: Callable[[Row], float], has_cp: bool) -> None:
    arms, sizes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("arm", "cp"))
    for arm in arms:
        for cp_size in sizes:
            points = [(row["length"], value(row)) for row in rows if (row["arm"], row["cp"]) == (arm, cp_size)]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    ms=4,
                    lw=1.8,
                    color=_COLOURS[arms.index(arm)],
                    ls=_STYLES[sizes.index(cp_size) % len(_STYLES)],
                    label=f"{arm}, cp={cp_size}" if has_cp else arm,
                )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k")
    axes.legend(loc="best", fontsize=7)


def _draw_speed(axes: Any, rows: list[Row]) -> None:
    axes.set_title("Update: tokens per second of a rank")
    _draw_lines(axes, rows, lambda row: row["tokens_per_second"], has_cp=True)
    axes.set_xlabel("longest response")
    axes.set_ylim(bottom=0)


def _draw_memory(axes: Any, rows: list[Row]) -> None:
    axes.set_title("Peak of a microbatch per rank, MiB")
    _draw_lines(axes, rows, lambda row: row["peak_bytes"] / 2**20, has_cp=True)
    axes.set_xlabel("longest response")
    axes.set_yscale("log")


def _draw_logits(axes: Any, rows: list[Row]) -> None:
    axes.set_title("Large vocabulary: peak by chunk, GiB")
    _draw_lines(axes, rows, lambda row: row["peak_bytes"] / 2**30, has_cp=False)
    axes.set_xlabel("tokens of the microbatch")
    axes.set_ylim(bottom=0)


def _draw_context(axes: Any, rows: list[Row]) -> None:
    axes.set_title(f"Peak of {rows[0]['length']} tokens per rank, MiB")
    sizes = sorted({row["cp"] for row in rows})
    for number, arm in enumerate(dict.fromkeys(row["arm"] for row in rows)):
        peaks = [row["peak_bytes"] / 2**20 for row in rows if row["arm"] == arm]
        axes.plot(sizes, peaks, marker="o", color=_COLOURS[number], label=f"recomputation: {arm}")
        axes.plot(sizes, [peaks[0] * sizes[0] / size for size in sizes], ls=":", lw=1, color=_COLOURS[number])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("context parallel size (dotted: ideal)")
    axes.legend(loc="best", fontsize=8)


def _draw_packing(axes: Any, rows: list[Row]) -> None:
    axes.set_title("Long-tailed batch: tokens per second of a rank")
    axes.bar(
        [row["arm"].replace(", ", ",\n") for row in rows],
        [row["tokens_per_second"] for row in rows],
        color=_COLOURS[: len(rows)],
    )


def _draw_linear(axes: Any, rows: list[Row]) -> None:
    axes.set_title("Seconds of an update per 1000 tokens")
    _draw_lines(axes, rows, lambda row: 1000 * statistics.median(row["seconds"]) / row["tokens"], has_cp=False)
    axes.set_xlabel("tokens in all")
    axes.set_ylim(bottom=0)


_PANELS: tuple[tuple[str, Callable[[Any, list[Row]], None]], ...] = (
    ("lengths", _draw_speed),
    ("lengths", _draw_memory),
    ("logits", _draw_logits),
    ("context", _draw_context),
    ("packing", _draw_packing),
    ("linear", _draw_linear),
)
