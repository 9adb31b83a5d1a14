# SPDX-License-Identifier: Apache-2.0
"""Leaks of a long run: resident memory, open files, threads, children and /dev/shm after every step.

    python tools/make_toy_task.py --out TASK
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tools/benchmarks/bench_soak.py \\
        launch/recipes/toy_arithmetic.yaml \\
        model.path=TASK/model data.train_files=[TASK/train.jsonl] data.validation_files=[TASK/validation.jsonl] \\
        actor.pipeline_model_parallel_size=1 trainer.run_dir=RUN --steps 1000 --json FILE

The JSON has first, last and largest value, and the least-squares slope per step of the last half, when allocators have
settled. /dev/shm includes other programs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import numpy as np
import psutil
import torch.distributed as dist

from megatron_rl.run.command_line import end_program
from megatron_rl.run.grpo import Trainer
from megatron_rl.run.loading import load_config
from megatron_rl.samples.experience import Experience


class SoakTrainer(Trainer):
    """A trainer that measures its process."""

    def describe(self, step: int, samples: Experience) -> None:
        """Describe the step, then measure."""
        super().describe(step, samples)
        self.run.settle()  # the rollout file is open while it is written
        self.__dict__.setdefault("measured", []).append(measure())


def measure() -> dict[str, float]:
    """Measure this process and shared memory."""
    process, shared = psutil.Process(), [p.stat().st_size for p in Path("/dev/shm").rglob("*") if p.is_file()]
    return {
        "seconds": time.monotonic(),
        "resident_mib": process.memory_info().rss / 2**20,
        "open_files": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(process.children(recursive=True)),
        "shm_files": len(shared),
        "shm_mib": sum(shared) / 2**20,
    }


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Return first, last, largest, and the slope of the last half."""
    half = np.asarray(values[len(values) // 2 :], dtype=np.float64)
    slope = float(np.polyfit(np.arange(len(half)), half, 1)[0]) if len(half) > 1 else 0.0
    return {"first": values[0], "last": values[-1], "largest": max(values), "slope_per_step": slope}


def soak(recipe: Path, overrides: Sequence[str], steps: int) -> dict[str, Any]:
    """Run; return the figures of all ranks; collective."""
    loaded = load_config(recipe, [*overrides, f"trainer.total_steps={steps}"])
    trainer = SoakTrainer.from_config(loaded.config, recipe)
    trainer.train()
    samples: list[list[dict[str, float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(samples, trainer.measured)
    ranks = [{name: summarize([s[name] for s in mine]) for name in mine[0]} for mine in samples]
    seconds = [rank.pop("seconds") for rank in ranks][0]
    return {
        "recipe": recipe.name,
        "overrides": list(overrides),
        "steps": len(samples[0]),
        "seconds_per_step": (seconds["last"] - seconds["first"]) / max(1, steps - 1),
        "ranks": ranks,
        "resident_mib_of_ranks": [[round(sample["resident_mib"], 3) for sample in mine] for mine in samples],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_intermixed_args(argv)
    try:
        found = soak(options.recipe, options.overrides, options.steps)
    except (Exception, KeyboardInterrupt) as error:
        return end_program(error)
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        for rank, figures in enumerate(found["ranks"]):
            for name, figure in figures.items():
                print(
                    f"rank {rank} {name:12} {figure['first']:10.1f} -> {figure['last']:10.1f}, "
                    f"slope of the last half {figure['slope_per_step']:+z.5f} per step"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
