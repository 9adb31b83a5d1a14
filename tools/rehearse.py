# SPDX-License-Identifier: Apache-2.0
"""Run a recipe's program on fake GPUs, and compare memory and traffic with the plan.

    python tools/rehearse.py launch/recipes/qwen2.5_7b_gsm8k.yaml --nodes 8 --gpus-per-node 8 --json rehearsal.json
    python tools/rehearse.py RECIPE.yaml actor.step_mode=static --nodes 1 --rank-class 0

One rank of each class builds the real roles, transfers weights, scores, takes two optimizer steps and saves, on tensors
without memory. Reported per phase: peak memory by line, collectives, host waits, copies. Exit status: 0 if every rank
agrees with tools/plan.py within 5 percent, 1 if not, 2 if the job cannot be rehearsed. Not covered: generation,
kernels, streams, allocator fragmentation, the MTP layer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.planning.cluster import Job
from megatron_rl.types import UserError
from tools.plan import build_parser as build_plan_parser
from tools.plan import read_plan_job
from tools.rehearsal.cuda_guard import compile_guard
from tools.rehearsal.report import find_problems, format_ranks, list_rank_classes

_ONE_RANK = Path(__file__).with_name("_rehearse_rank.py")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of tools/plan.py, plus rank options."""
    parser = build_plan_parser()
    parser.description = __doc__
    parser.add_argument("--rank-class", default="all", help="all (default), or one rank")
    parser.add_argument("--jobs", type=int, default=2, help="ranks that are rehearsed at once (2)")
    return parser


def read_rehearsed_job(arguments: list[str]) -> tuple[Job, argparse.Namespace]:
    """Return the job without memory reserve and MTP layer, which are not rehearsed, and with graphs as static steps.

    Raises:
        UserError: a job that cannot be planned.
    """
    options, overrides = build_parser().parse_known_args(arguments)
    options.reserve_gib = 0.0
    job = read_plan_job(options, overrides)[0].with_config(actor={"mtp_lr": 0.0}, rollout={"draft_tokens": 0})
    graphs = [role.section for role in job.spec.trained if role.training.step_mode == "graph"]
    return job.with_config(**{section: {"step_mode": "static"} for section in graphs}), options


def rehearse_apart(arguments: list[str], rank: int) -> dict[str, Any] | str:
    """Rehearse a rank in its own process; return its report, or its last output on failure."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rank.json"
        command = [sys.executable, str(_ONE_RANK), str(rank), str(file), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not file.is_file():
            return "\n".join((done.stderr or done.stdout).strip().splitlines()[-25:])
        return json.loads(file.read_text(encoding="utf-8"))


def _choose_ranks(job: Job, chosen: str) -> list[int]:
    if chosen == "all":
        return list_rank_classes(job)
    if not chosen.isdecimal() or int(chosen) >= job.cluster.world_size:
        raise UserError(
            f"rank {chosen} of {job.cluster.world_size}",
            source="--rank-class",
            expected=f"all, or a rank from 0 to {job.cluster.world_size - 1}",
            hint="leave it out: one rank of every class is rehearsed",
        )
    return [int(chosen)]


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        job, options = read_rehearsed_job(given)
        ranks = _choose_ranks(job, options.rank_class)
        compile_guard()
        with ThreadPoolExecutor(max(1, options.jobs)) as pool:
            found = list(pool.map(lambda rank: rehearse_apart(given, rank), ranks))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    reports = [report for report in found if isinstance(report, dict)]
    step_modes = {role.name: role.training.step_mode for role in job.spec.roles.values() if role.trainable}
    problems = [f"a rank could not be rehearsed:\n{text}" for text in found if isinstance(text, str)]
    problems += [problem for report in reports for problem in find_problems(report, step_modes)]
    if options.json is not None:
        result = {"recipe": str(options.recipe), "world_size": job.cluster.world_size, "problems": problems}
        options.json.write_text(json.dumps(result | {"ranks": reports}, indent=2) + "\n", encoding="utf-8")
    print(format_ranks(reports))
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
