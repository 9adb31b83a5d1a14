# SPDX-License-Identifier: Apache-2.0
"""Recipes on SmolLM2-135M-Instruct, each with several seeds: accuracy before, halfway and after training.

    python tools/benchmarks/bench_real_recipes.py --out DIR [--cases NAME...] [--seeds 1 2 3] [--steps 20]

Needs the model of launch/quickstart_real.sh; makes the prompts of the other tasks, aiw and gsm_symbolic with the
package reasoning-gym. `sft` is the recipe after a warm start on 96 right sums; `dpo` learns from 2,560 of the model's
own responses, in as many steps as they give pairs for. A run that --out already holds is not repeated. Accuracy is
greedy, on 128 prompts that are never trained on. Seconds of a step mean something only on a machine without other work.
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
from tools.benchmarks._real_tasks import (
    TASKS,
    VALIDATION_PROMPTS,
    read_rows,
    write_demonstrations,
    write_pairs,
    write_rows,
)
from tools.benchmarks.bench_real import ACCURACY, ENVIRONMENT, RECIPE
from tools.show_answers import compute_interval

SUMS, MODEL = ROOT / "checkpoints/smollm2", ROOT / "checkpoints/smollm2/model"
DEMONSTRATIONS, DEMONSTRATIONS_PER_STEP = 96, 16
DPO_PROMPTS, DPO_SAMPLES, PAIRS_PER_STEP = 320, 8, 16  # 2,560 responses, as 20 steps of the recipe draw
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
    "sft": ("sums", ()),  # after a warm start
    "dpo": ("sums", ("preference.loss=dpo", "preference.beta=0.1", "actor.lr=1e-5")),
    "calculator": (
        "calculator",
        (
            *("agents.environment=calculator", "agents.max_turns=3", 'rollout.stop=["]"]'),
            *("data.max_prompt_length=160", "data.max_response_length=40"),
        ),
    ),
    "aiw": ("aiw", ("data.max_prompt_length=200", "data.max_response_length=48")),
    "gsm_symbolic": ("gsm_symbolic", ("data.max_prompt_length=256", "data.max_response_length=96")),
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="recipes to run (all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N", help="seeds of each (1 2 3)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run (20)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of a run (all)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the runs and result.json")
    return parser


def find_prompts(task: str, out: Path) -> list[str]:
    """Return the settings of a task's prompts, which are made if they are missing."""
    if task == "sums":
        return []
    directory = out / task
    if not (directory / "validation.jsonl").exists():
        TASKS[task](directory)
    return [f"data.{name}_files=[{directory / name}.jsonl]" for name in ("train", "validation")]


def launch(directory: Path, options: argparse.Namespace, program: str, *arguments: str) -> None:
    """Run a program on one rank with a log beside its directory.

    Raises:
        UserError: the program failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(options.threads)}
    log = Path(f"{directory}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        command += [program, str(RECIPE), *arguments]
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    if status:
        raise UserError(
            f"{program} for {directory.name} ended with status {status}",
            source=str(log),
            expected="a program that ends",
            hint="look at the end of the log",
        )


def warm_start(directory: Path, seed: int, options: argparse.Namespace) -> list[str]:
    """Fine-tune on a few demonstrations, once through; return the setting of the model."""
    demonstrations, run = directory / "demonstrations.jsonl", directory / "warm_start"
    write_demonstrations(SUMS / "train.jsonl", DEMONSTRATIONS, demonstrations)
    settings = [f"data.train_files=[{demonstrations}]", "data.validation_files=[]", "data.answer_key=response"]
    settings += [f"data.train_batch_size={DEMONSTRATIONS_PER_STEP}", "trainer.save_freq=0", f"trainer.seed={seed}"]
    steps = DEMONSTRATIONS // DEMONSTRATIONS_PER_STEP
    settings += [f"trainer.total_steps={steps}", f"trainer.run_dir={run}"]
    launch(run, options, "launch/pretrain_sft.py", *settings)
    return [f"model.path={run}/checkpoints/latest/huggingface"]


def evaluate(directory: Path, options: argparse.Namespace, model: Path, *settings: str) -> list[dict[str, Any]]:
    """Sample and score responses of a model with tools/evaluate.py; return them."""
    launch(directory, options, "tools/evaluate.py", f"model.path={model}", "--rollouts", str(directory), *settings)
    [file] = directory.glob("*/rollouts/step_*.jsonl")
    return read_rows(file)


def run_preference(directory: Path, seed: int, settings: tuple[str, ...], options: argparse.Namespace) -> None:
    """Learn from pairs of the model's own responses; write its accuracy before, halfway and after training."""
    prompts, pairs, run = directory / "prompts.jsonl", directory / "pairs.jsonl", directory / "run"
    write_rows(prompts, read_rows(SUMS / "train.jsonl")[:DPO_PROMPTS])
    sampling = ("rollout.validation_temperature=1.0", "--samples", str(DPO_SAMPLES), f"trainer.seed={seed}")
    sampled = evaluate(directory / "sampled", options, MODEL, f"data.validation_files=[{prompts}]", *sampling)
    steps = write_pairs(prompts, sampled, seed, pairs) // PAIRS_PER_STEP
    more = [f"data.train_files=[{pairs}]", "data.validation_files=[]", f"data.train_batch_size={PAIRS_PER_STEP}"]
    more += [f"trainer.seed={seed}", f"trainer.total_steps={steps}", f"trainer.run_dir={run}"]
    more += [f"trainer.save_freq={steps // 2}"]
    launch(run, options, "launch/pretrain_preference.py", *settings, *more)
    rows = []
    for step in (0, steps // 2, steps):
        responses = evaluate(
            directory / f"evaluated_{step}", options, run / f"checkpoints/step_{step}" if step else MODEL
        )
        rows.append({"step": step, ACCURACY: statistics.mean(row["reward"] >= 1 for row in responses)})
    write_rows(directory / METRICS_FILE, rows)


def run_case(name: str, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a recipe with a seed unless it has run; return its metrics."""
    directory, (task, settings) = options.out / f"{name}_{seed}", CASES[name]
    file = directory / METRICS_FILE
    rows = read_rows(file) if file.exists() else []
    if rows and (name == "dpo" or rows[-1]["step"] == options.steps):
        return rows
    if name == "dpo":
        run_preference(directory, seed, settings, options)
        return read_rows(file)
    more = [*settings, f"trainer.seed={seed}", f"trainer.total_steps={options.steps}"]
    more += [f"trainer.test_freq={max(options.steps // 2, 1)}", f"trainer.run_dir={directory}"]
    if name == "sft":
        more += warm_start(options.out / f"{name}_{seed}_data", seed, options)
    launch(directory, options, "launch/pretrain_grpo.py", *find_prompts(task, options.out), *more)
    return read_rows(file)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the accuracies of a run and the last one's interval; of GRPO also rewards and seconds of a step."""
    accuracies = [row[ACCURACY] for row in rows if ACCURACY in row]
    interval = compute_interval(round(accuracies[-1] * VALIDATION_PROMPTS), VALIDATION_PROMPTS)
    found: dict[str, Any] = {"accuracy": accuracies, "interval": interval}
    if steps := [row for row in rows if "reward/mean" in row]:
        found["reward"] = [steps[0]["reward/mean"], steps[-1]["reward/mean"]]
        seconds = [row["time/step"] - row.get("time/validation", 0.0) for row in steps]
        found["step_seconds"] = statistics.median(seconds)
    return found


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
