# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/rehearsal.md and docs/planning.md: every shipped recipe, on the cluster in its header.

    python tools/_rehearsal_table.py DIRECTORY [RECIPE ...]
    python tools/_rehearsal_table.py --plans [RECIPE ...]

The first rehearses; existing reports, DIRECTORY/<recipe>.json, are reused. The second compares a recipe's planned
seconds with the fastest layout that its planner finds.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation

from megatron_rl.planning.admission import judge, list_candidates
from megatron_rl.planning.cluster import GIB
from tools.plan import build_parser, read_plan_job
from tools.planning.communication import Assumptions, predict_seconds
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


def print_plans(recipes: list[Path]) -> None:
    """Print the seconds of a step that recipes and the best layouts for them are predicted to take."""
    predict = partial(predict_seconds, Assumptions())
    print("| recipe | GPUs | planned s | best layout s | ratio | changes |\n|---|---|---|---|---|---|")
    for recipe in recipes:
        job = read_plan_job(*build_parser().parse_known_args([str(recipe), *find_command(recipe)[1:]]))[0]
        own, [best, *_] = judge(job, predict), list_candidates(job, predict)
        assert own is not None, f"{recipe} does not fit"
        changes = " ".join(best.choice.overrides(job)) if own.seconds > best.seconds else ""
        seconds = f"{own.seconds:.1f} | {best.seconds:.1f} | {own.seconds / best.seconds:.3f}"
        print(f"| {recipe.stem} | {job.cluster.world_size} | {seconds} | {changes} |", flush=True)


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
    first, *given = map(Path, sys.argv[1:])
    shipped = sorted(
        path for path in (ROOT / "launch/recipes").glob("*.yaml") if not path.name.startswith(("toy_", "smollm2_"))
    )
    if str(first) == "--plans":
        print_plans(given or shipped)
    else:
        main(first, given or shipped)
