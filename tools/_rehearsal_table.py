# SPDX-License-Identifier: Apache-2.0
"""The table of docs/rehearsal.md: every shipped recipe, rehearsed on the cluster in its header.

    python tools/_rehearsal_table.py DIRECTORY [RECIPE ...]

Existing reports, DIRECTORY/<recipe>.json, are reused.
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
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation

from megatron_rl.planning.cluster import GIB
from tools.rehearsal.report import SMALL, Found, compare_rank
from tools.rehearse import read_rehearsed_job


def find_command(recipe: Path) -> list[str]:
    """Read a recipe's arguments of tools/plan.py."""
    head = "#   python tools/plan.py "
    [line] = [line for line in recipe.read_text(encoding="utf-8").splitlines() if line.startswith(head)]
    return shlex.split(line.removeprefix(head))


def list_rows(name: str, world_size: int, ranks: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the rank that differs most from the plan per phase and axis, then the duration."""
    memory = [(row["phase"], row) for rank in ranks for row in rank["memory"]]
    memory += [("on the host", rank["host"]) for rank in ranks if max(rank["host"].values()) > SMALL]
    sent = [(f"{row['role']} {row['axis']}, sent", row) for rank in ranks for row in rank["traffic"]]
    found = memory + [(what, row) for what, row in sent if max(row["planned"], row["rehearsed"]) > SMALL]
    head = f"| {name} | {world_size} |"
    for what in dict(found):
        row = max((row for other, row in found if other == what), key=_find_difference)
        planned, rehearsed = row["planned"] / GIB, row["rehearsed"] / GIB
        off = f"{rehearsed / planned - 1:+.1%}" if planned else "-"
        yield f"{head} {what} | {planned:.2f} | {rehearsed:.2f} | {off} |"
        head = "| | |"
    if not ranks:
        yield f"{head} could not be rehearsed | | | |"
        return
    numbers, longest = ", ".join(str(rank["rank"]) for rank in ranks), max(rank["seconds"] for rank in ranks)
    yield f"{head} ranks {numbers}: {longest:.0f} s at most | | | |"


def _find_difference(row: dict[str, Any]) -> float:
    return abs(row["rehearsed"] - row["planned"]) / max(row["rehearsed"], row["planned"])


def main(directory: Path, recipes: list[Path]) -> None:
    """Rehearse recipes without a report, and print the table."""
    directory.mkdir(parents=True, exist_ok=True)
    print("| recipe | GPUs | | planned GiB | rehearsed GiB | |\n|---|---|---|---|---|---|")
    for recipe in recipes:
        file, arguments = directory / f"{recipe.stem}.json", find_command(recipe)
        if not file.is_file():
            command = [sys.executable, "tools/rehearse.py", *arguments, "--json", str(file)]
            subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        job, report = read_rehearsed_job(arguments)[0], json.loads(file.read_text(encoding="utf-8"))
        ranks = [
            rank | compare_rank(job, rank["rank"], Found(rank["phases"], rank["rows"], rank["host"]["rehearsed"]))
            for rank in report["ranks"]
        ]
        for row in list_rows(recipe.stem, report["world_size"], ranks):
            print(row, flush=True)


if __name__ == "__main__":
    given = [Path(path) for path in sys.argv[2:]]
    shipped = sorted(
        path for path in (ROOT / "launch/recipes").glob("*.yaml") if not path.name.startswith(("toy_", "smollm2_"))
    )
    main(Path(sys.argv[1]), given or shipped)
