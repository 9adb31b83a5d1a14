# SPDX-License-Identifier: Apache-2.0
"""Rollouts to a held-out accuracy with and without `data.curriculum`: sums of graded difficulty, several seeds.

    python tools/benchmarks/bench_curriculum.py --out DIR [--seeds 1 2 3 4 5] [--steps 160] [--target 0.5]

The training set has 640 sums: 30 % without a carry, which the warm-started toy model can do; 10 % with a carry, which
it can do now and then; 60 % of three digits, which it has never seen. The held-out set is that of the toy task, sums of
two digits with and without carry. Every run has 16 prompts x 8 responses per step. Arms: uniform sampling; chances by
pass rates of prompts; and by pass rates of the three levels. Results: DIR/curriculum.json and DIR/curriculum.png.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation

from megatron_rl.observability.metrics import METRICS_FILE
from megatron_rl.types import UserError
from tools.benchmarks.bench_real import ENVIRONMENT
from tools.make_toy_task import forget_carries, main

ACCURACY = "validation/validation/accuracy"
COUNTS = {0: 192, 1: 64, 2: 384}  # training prompts by level: no carry, carry, three digits
PROMPTS, RESPONSES, TEST_FREQ = 16, 8, 5
ARMS = {
    "uniform": [],
    "prompts": ["data.curriculum.kind=prioritized"],
    "levels": ["data.curriculum.kind=prioritized", "data.curriculum.column=level"],
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory for task, runs, JSON, picture"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="seeds of the runs (1 to 5)")
    parser.add_argument("--steps", type=int, default=160, help="steps of a run (160)")
    parser.add_argument("--target", type=float, default=0.5, help="held-out accuracy to reach (0.5)")
    parser.add_argument("--arms", nargs="+", default=[*ARMS], choices=ARMS, help="arms to run (all)")
    return parser


def grade(row: dict[str, Any]) -> int:
    """Return the level of a sum."""
    digits = max(len(number) for number in row["prompt"].rstrip("=").split("+"))
    return 2 if digits > 2 else int(forget_carries(row["prompt"]) != row["answer"])


def write_graded(task: Path) -> None:
    """Write the training set, `graded.jsonl`, from the toy task's prompts."""
    rows = [json.loads(line) for line in (task / "train_mixed.jsonl").read_text().splitlines()]
    generator, graded = random.Random(1), list[dict[str, Any]]()
    for level, count in COUNTS.items():
        graded += generator.sample([row | {"level": level} for row in rows if grade(row) == level], count)
    (task / "graded.jsonl").write_text("".join(json.dumps(row) + "\n" for row in graded))


def run(script: str, arguments: Sequence[str], log: Path) -> None:
    """Run a launcher on one rank (UserError if it fails)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    environment = os.environ | ENVIRONMENT | ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with log.open("wb") as output:
        command = [sys.executable, str(ROOT / "launch" / script), *arguments]
        status = subprocess.call(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    if status:
        hint = "look at the end of the log"
        raise UserError(f"status {status}", source=str(log), expected="a run of all steps", hint=hint)


def prepare(out: Path) -> Path:
    """Make the task and the warm start, unless they are there; return the directory of the task."""
    task = out / "task"
    if main(["--out", str(task)]):
        raise UserError("no task", source=str(task), expected="a toy task", hint="see above")
    write_graded(task)
    if not (task / "warm_start/summary.json").exists():
        settings = [f"model.path={task}/model", f"data.train_files=[{task}/train.jsonl]"]
        settings += [f"trainer.run_dir={task}/warm_start"]
        run("pretrain_sft.py", ["launch/recipes/toy_arithmetic_sft.yaml", *settings], out / "warm_start.log")
    return task


def train(arm: str, seed: int, task: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run an arm, unless its result is there; return its curve."""
    directory = options.out / f"{arm}_{seed}"
    if not (directory / "summary.json").exists():
        settings = [
            f"model.path={task}/warm_start/checkpoints/latest/huggingface",
            f"data.train_files=[{task}/graded.jsonl]",
            f"data.validation_files=[{task}/validation.jsonl]",
            f"data.train_batch_size={PROMPTS}",
            f"rollout.n={RESPONSES}",
            "actor.tensor_model_parallel_size=1",
            "actor.pipeline_model_parallel_size=1",
            "actor.sequence_parallel=false",
            f"actor.ppo_mini_batch_size={PROMPTS}",
            f"trainer.total_steps={options.steps}",
            f"trainer.test_freq={TEST_FREQ}",
            f"trainer.seed={seed}",
            f"trainer.run_dir={directory}",
            "checkpoint.contents=[optimizer]",
        ]
        recipe = "launch/recipes/toy_arithmetic.yaml"
        run("pretrain_grpo.py", [recipe, *settings, *ARMS[arm]], options.out / f"{arm}_{seed}.log")
    records = [json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()]
    curve = [(record["step"] * PROMPTS * RESPONSES, record[ACCURACY]) for record in records if ACCURACY in record]
    reached = next((rollouts for rollouts, accuracy in curve if accuracy >= options.target), None)
    idle = [record["reward/uninformative_groups"] for record in records if record["step"]]
    return {"arm": arm, "seed": seed, "reached": reached, "uninformative": statistics.fmean(idle), "curve": curve}


def summarize(runs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield for each arm the rollouts to the target, and the accuracy at the end: mean and standard deviation."""
    for arm in dict.fromkeys(row["arm"] for row in runs):
        mine = [row for row in runs if row["arm"] == arm]
        reached, last = [row["reached"] for row in mine], [row["curve"][-1][1] for row in mine]
        found = {"runs": len(mine), "reached": sum(value is not None for value in reached)}
        if None not in reached:
            found |= {"rollouts": statistics.fmean(reached), "rollouts_std": statistics.pstdev(reached)}
        idle = statistics.fmean(row["uninformative"] for row in mine)
        found |= {"accuracy": statistics.fmean(last), "accuracy_std": statistics.pstdev(last), "uninformative": idle}
        yield arm, found


def plot(runs: Sequence[dict[str, Any]], target: float, file: Path) -> None:
    """Plot the mean accuracy of each arm over rollouts, with the range of its seeds."""
    import matplotlib as mpl
    from matplotlib import pyplot

    from megatron_rl.observability.curves import STYLE

    mpl.use("Agg")
    with pyplot.rc_context(STYLE):
        figure, panel = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
        for arm in dict.fromkeys(row["arm"] for row in runs):
            curves = [row["curve"] for row in runs if row["arm"] == arm]
            over = [rollouts for rollouts, _ in curves[0]]
            values = [[accuracy for _, accuracy in points] for points in zip(*curves, strict=True)]
            (line,) = panel.plot(over, [*map(statistics.fmean, values)], label=arm)
            panel.fill_between(over, [*map(min, values)], [*map(max, values)], alpha=0.2, color=line.get_color())
        panel.axhline(target, linestyle=":", color="gray")
        panel.set_title("held-out accuracy over rollouts")
        panel.legend()
        figure.savefig(file, dpi=100)


def bench(options: argparse.Namespace) -> int:
    """Run all arms and seeds; write the results after each run."""
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    task, runs = prepare(options.out), list[dict[str, Any]]()
    for seed in options.seeds:
        for arm in options.arms:
            runs.append(train(arm, seed, task, options))
            print({key: value for key, value in runs[-1].items() if key != "curve"}, runs[-1]["curve"][-1], flush=True)
            result = {"target": options.target, "counts": COUNTS, "summary": dict(summarize(runs)), "runs": runs}
            (options.out / "curriculum.json").write_text(json.dumps(result, indent=2) + "\n")
    plot(runs, options.target, options.out / "curriculum.png")
    print(json.dumps(dict(summarize(runs)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(bench(build_parser().parse_args()))
