# SPDX-License-Identifier: Apache-2.0
"""Cost of the metrics and the console as shares of the step, in one run of a recipe.

    python tools/make_toy_task.py --out TASK
    OMP_NUM_THREADS=1 python tools/benchmarks/bench_metrics.py launch/recipes/toy_arithmetic.yaml \\
        model.path=TASK/model data.train_files=[TASK/train.jsonl] data.validation_files=[] trainer.total_steps=20

Measured in a process without torchrun, so with a layout of one rank: the seconds inside of functions that compute and
record metrics, over the sum of time/step. The first step is left out. `record` covers metrics.jsonl, TensorBoard,
alarms and the console. The goal is at most 1 % for all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

from megatron_rl.observability.metrics import read_metrics
from megatron_rl.observability.run import Run
from megatron_rl.run import grpo
from megatron_rl.run.loading import load_config

GOAL = 0.01


def measure(overrides: list[str], recipe: Path) -> dict[str, float]:
    """Train, and return the share of the steps' time in each measured function."""
    seconds: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds.setdefault(name, []).append(time.perf_counter() - start)

        return call

    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        config = load_config(recipe, [*overrides, f"trainer.run_dir={run_dir}", "trainer.save_final=false"]).config
        functions = ("describe_rollouts", "describe_tokens", "describe_sources", "describe_staleness")
        patches = [mock.patch.object(grpo, name, timed(name, getattr(grpo, name))) for name in functions]
        patches.append(mock.patch.object(Run, "record", timed("record", Run.record)))
        for patch in patches:
            patch.start()
        grpo.Trainer.from_config(config, recipe).train()
        for patch in patches:
            patch.stop()
        steps = [record for record in read_metrics(run_dir) if (record["step"] or 0) > 1]
    whole = sum(record["time/step"] or 0.0 for record in steps)
    shares = {name: sum(found[-len(steps) :]) / whole for name, found in seconds.items()}
    return {"steps": len(steps), "seconds per step": whole / len(steps), **shares, "all": sum(shares.values())}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; status 1 above the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("settings", nargs="*", help="key=value")
    args = parser.parse_args(arguments)
    found = measure(args.settings, args.recipe)
    print(json.dumps(found, indent=2))
    return int(found["all"] > GOAL)


if __name__ == "__main__":
    sys.exit(main())
