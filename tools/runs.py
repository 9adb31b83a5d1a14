# SPDX-License-Identifier: Apache-2.0
"""Show the runs below a directory: a table in the terminal, or a page with curves and samples side by side.

    python tools/runs.py checkpoints/runs
    python tools/runs.py checkpoints/runs --filter state=failed lr=1e-4 'best>0.5' --sort=-best
    python tools/runs.py checkpoints/runs --serve

docs/runs.md describes the columns, the filter and the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_rl.types import UserError
from tools._arguments import Arguments
from tools.runs_page.table import COLUMNS, RunRow, RunTable, select, show_value

_STYLES = {"running": "cyan", "finished": "green", "stopped": "yellow", "failed": "red"}
_NUMBERS = ("step", "validation", "best", "reward", "loss", "age")


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = Arguments(description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory of runs, at most three folders deep")
    parser.add_argument("--filter", nargs="+", default=[], metavar="TERM", help="TEXT, KEY=VALUE, KEY<NUMBER ...")
    parser.add_argument("--sort", default="age", metavar="KEY", help="a column or a setting; --sort=-KEY: descending")
    parser.add_argument(
        "--serve", nargs="?", type=int, const=0, metavar="PORT", help="serve a page on this machine (0: any free port)"
    )
    options = parser.parse_args(arguments)
    try:
        table = RunTable(options.directory)
        if options.serve is not None:
            from tools.runs_page.server import serve

            serve(table, options.serve)
        else:
            rows = table.read()
            print_rows(Console(), select(rows, options.filter, options.sort), len(rows))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def print_rows(console: Console, rows: list[RunRow], num_all: int) -> None:
    """Print the table, without columns that have no values, and the number of runs."""
    cells = [_format_row(row) for row in rows]
    names = [name for name in (*COLUMNS, "differs in") if any(line.get(name, "") for line in cells)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        is_number = name in _NUMBERS
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row, line in zip(rows, cells, strict=True):
        table.add_row(*(Text(line[name], _STYLES[row.state] if name == "state" else "") for name in names))
    console.print(table)
    of = f"{num_all} run" if num_all == 1 else f"{num_all} runs"
    shown = f"{len(rows)} of {of}" if len(rows) < num_all else of
    counts = {state: sum(row.state == state for row in rows) for state in _STYLES}
    console.print(f"{shown}: " + (", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"))


def _format_row(row: RunRow) -> dict[str, str]:
    best = _format(row.best)
    return {
        "name": row.name,
        "state": row.state,
        "step": f"{row.step}/{row.steps}" if row.steps else str(row.step),
        "validation": _format(row.validation),
        "best": best if row.is_best_exact or not best else f">={best}",
        "reward": _format(row.reward),
        "loss": _format(row.loss),
        "age": format_age(row.age),
        "differs in": " ".join(
            [f"{key}={show_value(value)}" for key, value in row.differences.items()]
            + ([f"({row.reason})"] if row.reason else [])
        ),
    }


def _format(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def format_age(seconds: float) -> str:
    """Return seconds in the largest unit that they fill: 45 s, 12 min, 3 h, 8 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
