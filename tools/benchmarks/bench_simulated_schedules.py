# SPDX-License-Identifier: Apache-2.0
"""Simulated schedules of 8B parameters on 64 GPUs, for docs/schedules.md.

    python tools/benchmarks/bench_simulated_schedules.py --median 4000 --sigma 1.0 --json FILE

An engine is one GPU of 80 GB: a decoding pass takes 7 ms, 20 us per response and 57 ns per token in the KV cache of
380,000; training, log-probs and prefill reach 400e12 operations per second.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

from tools.planning.engine_clock import EngineModel, StepCost
from tools.planning.lengths import LengthModel, make_lognormal
from tools.planning.schedules import Costs, Schedule, simulate

GPUS, PARAMETERS, SPEED = 64, 8e9, 400e12
PROMPTS, GROUP_SIZE, PROMPT_TOKENS, LONGEST = 128, 16, 1024, 32768
ENGINE = EngineModel(StepCost(7e-3, 2e-5, 2 * PARAMETERS / SPEED, 57e-9), max_num_seqs=256, cache_tokens=380_000)
SWITCH_COLOCATED, SWITCH_OWN_RANKS = 6.0, 2.0

Row = tuple[str, Schedule, int]  # name, schedule, GPUs with engines

ROWS: list[Row] = [
    ("synchronous, whole groups", Schedule(dispatch="groups"), GPUS),
    ("synchronous, samples spread", Schedule(dispatch="samples"), GPUS),
    *((f"colocated, stream, k={k}", Schedule(k), GPUS) for k in (1, 2)),
    *((f"colocated, whole, k={k}", Schedule(k, order="whole"), GPUS) for k in (1, 2)),
    ("own ranks 56 + 8, drain, k=1", Schedule(1, "drain", own_ranks=True), 56),
    ("own ranks 24 + 40, k=0", Schedule(0, own_ranks=True), 24),
    *(
        (f"own ranks {engines} + {GPUS - engines}, in flight, k={k}", Schedule(k, own_ranks=True), engines)
        for k, engines in ((1, 48), (1, 56), (2, 24), (2, 48), (2, 56), (2, 60), (4, 56))
    ),
    *(
        (f"own ranks {engines} + {GPUS - engines}, whole, k={k}", Schedule(k, order="whole", own_ranks=True), engines)
        for k, engines in ((1, 48), (1, 56), (2, 48), (2, 56), (4, 56))
    ),
]


def describe_costs(engines: int) -> Costs:
    """Return the costs with `engines` GPUs for engines."""
    trainers = GPUS - engines or GPUS

    def train(tokens: int) -> float:
        """Count two operations per weight and token for old log-probs, six for the update."""
        return 8 * PARAMETERS * (tokens + PROMPTS * PROMPT_TOKENS) / (trainers * SPEED)

    switch = SWITCH_COLOCATED if engines == GPUS else SWITCH_OWN_RANKS
    return Costs(ENGINE, engines, PROMPTS, GROUP_SIZE, PROMPT_TOKENS, LONGEST, train, switch)


def simulate_rows(rows: list[Row], lengths: LengthModel, steps: int) -> dict[str, dict[str, Any]]:
    """Simulate rows, skipping a third of the steps; "faster" is relative to the first row."""
    found: dict[str, dict[str, Any]] = {}
    for name, schedule, engines in rows:
        times = simulate(schedule, describe_costs(engines), lengths, steps=steps, skip=steps // 3)
        first = next(iter(found.values()))["seconds"] if found else times.seconds
        found[name] = asdict(times) | {"faster": first / times.seconds}
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--median", type=float, default=4000.0, help="tokens of the median response (default 4000)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lengths' logarithm (default 1)")
    parser.add_argument("--correlation", type=float, default=0.5, help="inside of a prompt (default 0.5)")
    parser.add_argument("--steps", type=int, default=90, help="steps; the first third is not counted (default 90)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(arguments)
    lengths = make_lognormal(args.median, args.sigma, args.correlation)
    print(lengths.describe(LONGEST))
    found = simulate_rows(ROWS, lengths, args.steps)
    for name, row in found.items():
        print(
            f"{name:42}{row['seconds']:8.1f} s{row['faster']:7.2f}  engines idle {row['engine_idle']:4.0%}  staleness "
            f"{row['staleness_mean']:.2f}, at most {row['staleness_max']}"
        )
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        args.json.write_text(json.dumps({"settings": settings, "schedules": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
