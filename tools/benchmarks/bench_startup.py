# SPDX-License-Identifier: Apache-2.0
"""Startup time: wall and CPU-seconds from `torchrun` to each stage of real runs.

    python tools/make_toy_task.py --out TASK
    OMP_NUM_THREADS=1 python tools/benchmarks/bench_startup.py --nproc 4 --rounds 3 --json FILE -- \\
        launch/recipes/toy_arithmetic.yaml \\
        model.path=TASK/model data.train_files=[TASK/train.jsonl] data.validation_files=[TASK/validation.jsonl]

Stages: `built` (roles and engines), `first_step` (after validation), `first_update` (end of step 1). Copied into an
older checkout, this file measures that commit. The first round only fills the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
STAGES = {"run directory:": "built", "step 0/": "first_step", "step 1/": "first_update"}


def measure_start(nproc: int, arguments: list[str]) -> dict[str, dict[str, float]]:
    """Run one step; return seconds by stage.

    Raises:
        RuntimeError: the run ended early.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as run_dir:
        settings = [f"trainer.run_dir={run_dir}/run", "trainer.total_steps=1", "trainer.save_freq=null"]
        start = time.monotonic()
        with subprocess.Popen(
            [*command, "launch/pretrain_grpo.py", *arguments, *settings],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            text=True,
        ) as run:
            launcher = psutil.Process(run.pid)
            assert run.stdout is not None
            for line in run.stdout:
                stage = next((stage for words, stage in STAGES.items() if line.startswith(words)), None)
                if stage is not None:
                    times = [p.cpu_times() for p in (launcher, *launcher.children(recursive=True))]
                    cpu = sum(t.user + t.system for t in times)
                    found[stage] = {"wall": time.monotonic() - start, "cpu": cpu}
        if run.returncode or set(found) != set(STAGES.values()):
            raise RuntimeError(f"the run ended with status {run.returncode} after {list(found)}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=4, help="ranks (4)")
    parser.add_argument("--rounds", type=int, default=3, help="runs that count (3)")
    parser.add_argument("--json", type=Path, help="write the result here as well", metavar="FILE")
    parser.add_argument("arguments", nargs="+", help="of launch/pretrain_grpo.py, after --")
    options = parser.parse_args(arguments)
    rounds = [measure_start(options.nproc, options.arguments) for _ in range(options.rounds + 1)][1:]
    result = {
        "nproc": options.nproc,
        "cores": os.cpu_count(),
        "medians": {
            stage: {clock: statistics.median(found[stage][clock] for found in rounds) for clock in ("wall", "cpu")}
            for stage in STAGES.values()
        },
        "rounds": rounds,
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
