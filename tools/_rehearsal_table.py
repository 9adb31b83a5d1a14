# SPDX-License-Identifier: Apache-2.0
"""The table of docs/rehearsal.md: every shipped recipe, rehearsed on the cluster that its head plans it for.

    python tools/_rehearsal_table.py DIRECTORY [RECIPE ...]

Reports are kept in DIRECTORY as <recipe>.json; one that is there already is not made again.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_GIB = 1 << 30


def find_command(recipe: Path) -> list[str]:
    """The arguments of tools/plan.py in a recipe's head."""
    head = "#   python tools/plan.py "
    [line] = [line for line in recipe.read_text(encoding="utf-8").splitlines() if line.startswith(head)]
    return shlex.split(line.removeprefix(head))


def list_rows(name: str, report: dict[str, Any]) -> Iterator[str]:
    """Of a recipe: the fullest rank of each phase, and the bytes that the busiest rank of each axis sends."""
    phases = {row["phase"]: row for rank in report["ranks"] for row in rank["memory"]}
    for phase in phases:
        found = [row for rank in report["ranks"] for row in rank["memory"] if row["phase"] == phase]
        yield _format(name, report, phase, max(found, key=lambda row: row["rehearsed"]))
    axes = {(row["role"], row["axis"]): row for rank in report["ranks"] for row in rank["traffic"]}
    for role, axis in axes:
        found = [
            row for rank in report["ranks"] for row in rank["traffic"] if (row["role"], row["axis"]) == (role, axis)
        ]
        row = max(found, key=lambda row: row["rehearsed"])
        if row["rehearsed"] > _GIB // 1024:
            yield _format(name, report, f"{role} {axis}, sent", row)


def _format(name: str, report: dict[str, Any], what: str, row: dict[str, Any]) -> str:
    planned, found = row["planned"] / _GIB, row["rehearsed"] / _GIB
    off = f"{found / planned - 1:+.1%}" if planned else "-"
    return f"| {name} | {report['world_size']} | {what} | {planned:.2f} | {found:.2f} | {off} |"


def main(directory: Path, recipes: list[Path]) -> None:
    """Entry point."""
    directory.mkdir(parents=True, exist_ok=True)
    print("| recipe | GPUs | | planned GiB | rehearsed GiB | |\n|---|---|---|---|---|---|")
    for recipe in recipes:
        file = directory / f"{recipe.stem}.json"
        if not file.is_file():
            command = [sys.executable, "tools/rehearse.py", *find_command(recipe), "--json", str(file)]
            subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        for row in list_rows(recipe.stem, json.loads(file.read_text(encoding="utf-8"))):
            print(row, flush=True)


if __name__ == "__main__":
    given = [Path(path) for path in sys.argv[2:]]
    shipped = sorted(path for path in (ROOT / "launch/recipes").glob("*.yaml") if not path.name.startswith("toy_"))
    main(Path(sys.argv[1]), given or shipped)
