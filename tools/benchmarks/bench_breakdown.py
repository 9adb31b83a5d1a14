# SPDX-License-Identifier: Apache-2.0
"""CPU-seconds of a training step by phase, over all ranks, optionally compared with other checkouts.

    python tools/benchmarks/bench_breakdown.py --recipe launch/recipes/toy_arithmetic.yaml --nproc 4 \\
        --against CHECKOUT --rounds 3 --json FILE model.path=DIR ...

Checkouts alternate. Figures are medians over steps, then over rounds; CPU time excludes waiting, so other load has
little effect. "rest" is time outside all phases. Extra steps time every operator for the share of matrix products and
attention.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WARMUP_STEPS, COMPUTE_STEPS = 2, 2
NESTED = {"step", "compute", "verify"}  # "verify" is part of "reshard"
Step = list[dict[str, float]]  # by rank


def run_checkout(options: argparse.Namespace, checkout: Path, directory: Path) -> list[Step]:
    """Run a round; return measurements by step and rank."""
    out, total = directory / "ranks", WARMUP_STEPS + options.steps + COMPUTE_STEPS + 1
    command = [
        *("torchrun", "--standalone", "--nproc-per-node", str(options.nproc)),
        *(str(ROOT / "tools/benchmarks/_breakdown_rank.py"), str(checkout), str(out)),
        *(str(COMPUTE_STEPS + 1), str(total), str(options.recipe.resolve()), f"trainer.run_dir={directory / 'run'}"),
        *("trainer.test_freq=0", "trainer.val_before_train=false", *options.overrides),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=sys.stderr)
    ranks = [
        [json.loads(line) for line in Path(f"{out}.{rank}").read_text().splitlines()] for rank in range(options.nproc)
    ]
    return [list(step) for step in zip(*ranks, strict=True)][WARMUP_STEPS:-1]  # the last step ends the run


def summarize(steps: list[Step], num_measured: int) -> dict[str, float]:
    """Return CPU-seconds by phase, and the shares of named phases and of compute.

    Args:
        steps: operators are timed only after the first `num_measured`.
    """

    def median(name: str, chosen: list[Step]) -> float:
        return statistics.median(sum(rank.get(name, 0.0) for rank in step) for step in chosen)

    measured, clocked = steps[:num_measured], steps[num_measured:]
    names = sorted({name for step in measured for rank in step for name in rank} - NESTED)
    found = {name: median(name, measured) for name in names}
    whole = median("step", measured)
    compute = median("compute", clocked)
    return found | {
        "rest": whole - sum(found.values()),
        "step": whole,
        "compute": compute,
        "named_share": sum(found.values()) / whole,
        "compute_share": compute / whole,
    }


def format_results(results: dict[str, dict[str, float]]) -> str:
    """Format a table, a column per checkout."""
    names = list(dict.fromkeys(name for found in results.values() for name in found))
    lines = [f"{'CPU-seconds per step':22}" + "".join(f"{Path(path).name[-14:]:>16}" for path in results)]
    lines += [f"{name:22}" + "".join(f"{found.get(name, 0.0):16.3f}" for found in results.values()) for name in names]
    first = next(iter(results.values()))["step"]
    return "\n".join(
        [*lines, f"{'of the first':22}" + "".join(f"{first / r['step']:15.2f}x" for r in results.values())]
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "launch/recipes/toy_arithmetic.yaml")
    parser.add_argument("--nproc", type=int, default=4, help="ranks")
    parser.add_argument("--against", type=Path, nargs="*", default=[], help="checkouts to compare with")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("overrides", nargs="*", help="section.key=value, as on the command line of the program")
    options = parser.parse_intermixed_args(arguments)
    checkouts = [*(path.resolve() for path in options.against), ROOT]
    rounds: dict[Path, list[dict[str, float]]] = {path: [] for path in checkouts}
    for number in range(options.rounds):
        for checkout in checkouts if number % 2 == 0 else checkouts[::-1]:
            with tempfile.TemporaryDirectory() as directory:
                try:
                    steps = run_checkout(options, checkout, Path(directory))
                except subprocess.CalledProcessError as error:
                    print(f"error: the program of {checkout} ended with {error.returncode}", file=sys.stderr)
                    return 2
                rounds[checkout].append(summarize(steps, options.steps))
    results: dict[str, dict[str, Any]] = {
        str(path): {name: statistics.median(r.get(name, 0.0) for r in found) for name in found[0]}
        for path, found in rounds.items()
    }
    print(format_results(results))
    if options.json:
        options.json.write_text(json.dumps({"medians": results, "rounds": {str(p): r for p, r in rounds.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
