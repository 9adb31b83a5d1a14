# SPDX-License-Identifier: Apache-2.0
"""Recipes on SmolLM2-135M-Instruct, each with several seeds: accuracy before, halfway and after training.

    python tools/benchmarks/bench_real_recipes.py --out DIR [--cases NAME...] [--seeds 1 2 3] [--steps 20]

Needs the model of launch/quickstart_real.sh; makes the prompts of the other tasks. A run that --out already holds is
not repeated. Accuracy is greedy, on 128 prompts that are never trained on. Seconds of a step mean something only on a
machine without other work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation

from megatron_rl.observability.metrics import METRICS_FILE
from megatron_rl.types import UserError
from tools.benchmarks.bench_real import ACCURACY, ENVIRONMENT, RECIPE
from tools.show_answers import compute_interval

VALIDATION_PROMPTS = 128
# Task -> operation and largest operand; sums are the recipe's own.
TASKS = {"products": ("*", 20), "differences": ("-", 30)}
# name -> task, settings on top of the recipe
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "recipe": ("sums", ()),
    "dr_grpo": ("sums", ("algorithm.adv_estimator=dr_grpo", "algorithm.loss_agg_mode=constant")),
    "gspo": (
        "sums",
        (
            *("algorithm.policy_loss=gspo", "algorithm.loss_agg_mode=seq-mean-token-mean"),
            *("algorithm.clip_eps_low=0.003", "algorithm.clip_eps_high=0.004"),
        ),
    ),
    "ppo": (
        "sums",
        (
            *("algorithm.adv_estimator=gae", "trainer.critic_warmup=2"),
            *("critic.lr=1e-4", "critic.max_tokens_per_microbatch=1024"),
        ),
    ),
    "lora": ("sums", ("actor.lora.rank=16", "actor.lora.alpha=32", "actor.lr=2e-4")),
    "bfloat16": ("sums", ("model.dtype=bfloat16",)),
    "products": ("products", ()),
    "differences": ("differences", ()),
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="recipes to run (all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N", help="seeds of each (1 2 3)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run (20)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the runs and result.json")
    return parser


def find_prompts(task: str, out: Path) -> list[str]:
    """Return the settings of a task's prompts, which are made if they are missing."""
    if task == "sums":
        return []
    directory, (operation, largest) = out / task, TASKS[task]
    if not (directory / "validation.jsonl").exists():
        command = [sys.executable, "tools/make_sums_task.py", "--out", str(directory), f"--operation={operation}"]
        command += ["--largest", str(largest), "--validation", str(VALIDATION_PROMPTS)]
        subprocess.run(command, cwd=ROOT, check=True)
    return [f"data.{name}_files=[{directory / name}.jsonl]" for name in ("train", "validation")]


def read_rows(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run so far."""
    file = directory / METRICS_FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run_case(name: str, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a recipe with a seed unless it has run; return its metrics.

    Raises:
        UserError: the run failed.
    """
    directory, (task, settings) = options.out / f"{name}_{seed}", CASES[name]
    rows = read_rows(directory)
    if rows and rows[-1]["step"] == options.steps:
        return rows
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += ["launch/pretrain_grpo.py", str(RECIPE), *find_prompts(task, options.out), *settings]
    command += [f"trainer.seed={seed}", f"trainer.total_steps={options.steps}", f"trainer.run_dir={directory}"]
    command += [f"trainer.test_freq={max(options.steps // 2, 1)}"]
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    with (options.out / f"{directory.name}.log").open("wb") as log:
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    if status:
        raise UserError(
            f"{name} with seed {seed} ended with status {status}",
            source=f"{directory}.log",
            expected="a run of all steps",
            hint="look at the end of the log",
        )
    return read_rows(directory)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the accuracies of a run, the last one's interval, first and last reward, and seconds of a step."""
    accuracies = [row[ACCURACY] for row in rows if ACCURACY in row]
    steps = [row for row in rows if "reward/mean" in row]
    return {
        "accuracy": accuracies,
        "interval": compute_interval(round(accuracies[-1] * VALIDATION_PROMPTS), VALIDATION_PROMPTS),
        "reward": [steps[0]["reward/mean"], steps[-1]["reward/mean"]],
        "step_seconds": statistics.median(row["time/step"] - row.get("time/validation", 0.0) for row in steps),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[int, Any]] = {}
    try:
        for seed in options.seeds:  # all recipes once, before a second seed
            for name in options.cases:
                results.setdefault(name, {})[seed] = found = summarize(run_case(name, seed, options))
                print(name, seed, json.dumps(found), flush=True)
                (options.out / "result.json").write_text(json.dumps(results, indent=2) + "\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
