# SPDX-License-Identifier: Apache-2.0
"""GRPO of SmolLM2-135M-Instruct in other layouts, types, engines and schedules: metrics compared with one rank.

    python tools/benchmarks/bench_real_layouts.py --out DIR [--cases NAME...] [--steps 2]

Needs the model and the prompts of launch/quickstart_real.sh; with fewer cores than ranks, seconds mean nothing. Steps
have 12 prompts x 4 responses. A row has the largest differences to the first case over the steps (reward, loss, and
relative of the gradient norm), the mismatch of engine and trainer, and seconds of a step. Log-probs of layouts differ
by about 1e-5, so a token that is drawn within that distance changes the rest of its response. The case `resume`
is killed before its last step and started again. The cases `long` draw 3 x 2 responses of 1,000 tokens, rewarded
by their share of distinct words, and are compared with the first of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation

from megatron_rl.observability.metrics import METRICS_FILE
from megatron_rl.types import UserError
from tools.benchmarks.bench_real import ENVIRONMENT, RECIPE

COMMON = (
    "data.train_batch_size=12",
    "data.validation_files=[]",
    "actor.ppo_mini_batch_size=12",
    "rollout.n=4",
    "rollout.kv_cache_gib=0.25",
)
SAVES = ("trainer.save_freq=1", "checkpoint.async_save=false")
LONG = (
    *("data.train_batch_size=3", "actor.ppo_mini_batch_size=3", "rollout.n=2"),
    *("data.max_response_length=1000", "rollout.min_tokens=1000", "actor.max_tokens_per_microbatch=2200"),
    *("rollout.kv_cache_gib=0.5", f"reward.components=['1.0 {Path(__file__).resolve()}:score_distinct_words']"),
)
# name -> (ranks, settings); the first is the one that the others are compared with.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "tp 3, vllm tp 3": (3, ("actor.tensor_model_parallel_size=3", "rollout.tensor_model_parallel_size=3")),
    "tp 3, vllm tp 1": (3, ("actor.tensor_model_parallel_size=3",)),
    "pp 2": (2, ("actor.pipeline_model_parallel_size=2",)),
    "dp 2": (2, ()),
    "cp 3": (3, ("actor.context_parallel_size=3",)),
    "cp 3, vllm tp 3": (3, ("actor.context_parallel_size=3", "rollout.tensor_model_parallel_size=3")),
    "bitwise": (1, ("rollout.bitwise=true",)),
    "bfloat16": (1, ("model.dtype=bfloat16",)),
    "int8 engine": (1, ("rollout.quantization=int8", "algorithm.importance_sampling=token-truncate")),
    "staleness 1": (1, ("schedule.max_staleness=1", "algorithm.importance_sampling=token-truncate")),
    "resume": (1, SAVES),
    "long": (1, LONG),
    "long, cp 3": (3, (*LONG, "actor.context_parallel_size=3")),
    "long, tp 3, vllm tp 3": (
        3,
        (*LONG, "actor.tensor_model_parallel_size=3", "rollout.tensor_model_parallel_size=3"),
    ),
}


def score_distinct_words(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return the share of a response's words that differ from all words before them."""
    words = solution_str.split()
    return len(set(words)) / max(len(words), 1)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="cases to run (all)")
    parser.add_argument("--steps", type=int, default=2, help="steps of a case (2 or more; 2)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the runs and result.json")
    return parser


def start(name: str, options: argparse.Namespace, *more: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a case; return its process and its run directory."""
    ranks, settings = CASES[name]
    directory = options.out / name.replace(",", "").replace(" ", "_")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["launch/pretrain_grpo.py", str(RECIPE), *COMMON, *settings, *more]
    command += [f"trainer.total_steps={options.steps}", f"trainer.run_dir={directory}"]
    threads = str(max((os.cpu_count() or 1) // ranks, 1))
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": threads}
    with (options.out / f"{directory.name}.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    return process, directory


def read_rows(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps of a run so far."""
    file = directory / METRICS_FILE
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [row for row in rows if "policy/loss" in row]


def run_case(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a case to its end; return the metrics of its steps.

    Raises:
        UserError: the run failed.
    """
    process, directory = start(name, options)
    if name == "resume":
        while process.poll() is None and len(read_rows(directory)) < options.steps - 1:
            time.sleep(0.05)
        if process.poll() is None:
            for rank in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(rank), signal.SIGKILL)
            process.wait()
            process, _ = start(name, options, "checkpoint.resume=must")
    if process.wait():
        raise UserError(
            f"the case {name} ended with status {process.returncode}",
            source=f"{directory}.log",
            expected="a run of all steps",
            hint="look at the end of the log",
        )
    return read_rows(directory)


def find_reference(name: str) -> str:
    """Return the case that a case is compared with."""
    return "long" if name.startswith("long") else next(iter(CASES))


def compare(rows: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the largest differences of two runs, and figures of the first."""

    def differ(key: str, *, relative: bool = False) -> float:
        pairs = [(row[key], other[key]) for row, other in zip(rows, reference, strict=True)]
        return max(abs(a - b) / (abs(b) if relative else 1) for a, b in pairs)

    is_same = all(
        value == other[key]
        for row, other in zip(rows, reference, strict=True)
        for key, value in row.items()
        if not key.startswith(("time/", "memory/", "tokens/per", "throughput/", "mfu/", "reshard/")) and key in other
    )
    return {
        "reward": [row["reward/mean"] for row in rows],
        "reward_difference": differ("reward/mean"),
        "loss_difference": differ("policy/loss"),
        "grad_norm_difference": differ("policy/grad_norm", relative=True),
        "first_grad_norm_difference": abs(rows[0]["policy/grad_norm"] / reference[0]["policy/grad_norm"] - 1),
        "mismatch_max": max(row["mismatch/max"] for row in rows),
        "same_metrics": is_same,
        "step_seconds": statistics.median(row["time/step"] for row in rows),
        "update_seconds": statistics.median(row["time/update"] for row in rows),
        "rollout_seconds": statistics.median(row["time/rollout"] for row in rows),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for name in dict.fromkeys(case for chosen in options.cases for case in (find_reference(chosen), chosen)):
            found[name] = run_case(name, options)
            results[name] = compare(found[name], found[find_reference(name)])
            print(name, json.dumps(results[name]), flush=True)
            (options.out / "result.json").write_text(json.dumps(results, indent=2) + "\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
