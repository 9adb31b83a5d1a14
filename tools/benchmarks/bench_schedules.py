# SPDX-License-Identifier: Apache-2.0
"""Schedules measured with scripted engines on real ranks, against the planner's simulator.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 8 tools/benchmarks/bench_schedules.py --json FILE

Every rank is an engine that sleeps through decoding passes in the real serving loop; training and weight updates sleep,
too. If many ranks share few cores, Python's time matters; `--pace` above 1 stretches all sleeps. Exit status 1 if a
measured step differs from the simulated one by over 5 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import numpy as np
import torch.distributed as dist

from megatron_rl.engines.protocol import Request, SamplingConfig
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.rollout.generation import assign_engines, generate
from tools.benchmarks._scripted_engine import VOCAB_SIZE, ScriptedEngine
from tools.benchmarks._scripted_stream import ScriptedStream
from tools.planning.engine_clock import EngineModel, StepCost
from tools.planning.lengths import LengthModel, make_lognormal
from tools.planning.schedules import Costs, Schedule, simulate

TOLERANCE = 0.05
# The proportions of 8B parameters on one GPU.
COST = StepCost(fixed=6e-3, per_request=2e-5, per_prompt_token=4e-5, per_context_token=5e-6)
SWITCH_SECONDS = 0.05
PROMPT_TOKENS = 10

Measure = Callable[[Schedule, Costs, LengthModel, int], float]


def measure_synchronous(schedule: Schedule, costs: Costs, lengths: LengthModel, steps: int) -> float:
    """Return the mean seconds of a synchronous step; collective."""
    sampling = SamplingConfig(temperature=1.0, max_tokens=costs.longest, stop_token_ids=())
    prompts = np.random.default_rng(0).integers(0, VOCAB_SIZE, (costs.batch_size, costs.prompt_tokens), dtype=np.int32)
    engine_of = assign_engines(
        schedule.dispatch, [costs.prompt_tokens] * costs.batch_size, costs.group_size, costs.num_engines, costs.longest
    )
    mine = np.flatnonzero(engine_of == dist.get_rank()).tolist()
    requests = [Request(index, prompts[index // costs.group_size], index, sampling) for index in mine]
    dist.barrier()
    start = time.perf_counter()
    for step in range(steps):
        drawn = lengths.draw(1, step * costs.batch_size, costs.batch_size, costs.group_size, costs.longest).ravel()
        engine = ScriptedEngine(
            dict(enumerate(drawn.tolist())), costs.engine.max_num_seqs, costs.engine.cost, time.sleep
        )
        generate(engine, requests)
        dist.barrier()
        time.sleep(costs.train(int(drawn.sum())) + costs.switch_seconds)
    return (time.perf_counter() - start) / steps


def measure_partial(schedule: Schedule, costs: Costs, lengths: LengthModel, steps: int) -> float:
    """Return the mean seconds of a step with partial rollouts, colocated or on own ranks; collective."""
    stream = ScriptedStream(schedule, costs, lengths, steps, time.sleep)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        stream.train(partial(time.sleep, costs.train(stream.take())))
        time.sleep(costs.switch_seconds)
    return (time.perf_counter() - start) / steps


# Schedule and measurement by name.
MODES: dict[str, tuple[Schedule, Measure]] = {
    "synchronous, whole groups": (Schedule(dispatch="groups"), measure_synchronous),
    "synchronous, samples spread": (Schedule(dispatch="samples"), measure_synchronous),
    "partial rollouts, k=1": (Schedule(1), measure_partial),
    "partial rollouts, k=2": (Schedule(2), measure_partial),
    "partial rollouts, whole, k=1": (Schedule(1, order="whole"), measure_partial),
    "partial rollouts, whole, k=2": (Schedule(2, order="whole"), measure_partial),
    "own ranks, k=1": (Schedule(1, own_ranks=True), measure_partial),
    "own ranks, k=2": (Schedule(2, own_ranks=True), measure_partial),
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step (default 16)")
    parser.add_argument("--group-size", type=int, default=16, help="responses per prompt (default 16)")
    parser.add_argument("--median", type=float, default=40.0, help="tokens of the median response (default 40)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lengths' logarithm (default 1)")
    parser.add_argument("--correlation", type=float, default=0.5, help="inside of a prompt (default 0.5)")
    parser.add_argument("--longest", type=int, default=400, help="longest response, tokens (default 400)")
    parser.add_argument("--slots", type=int, default=64, help="requests that an engine runs at once (default 64)")
    parser.add_argument("--train-cost", type=float, default=20.0, help="microseconds of training per token (20)")
    parser.add_argument("--trainers", type=int, default=1, help="ranks that train where engines have their own (1)")
    parser.add_argument("--steps", type=int, default=6, help="steps of every schedule (default 6)")
    parser.add_argument("--only", default="", help="measure the schedules whose names contain this (default: all)")
    parser.add_argument("--pace", type=float, default=1.0, help="times as long as on the GPU that is simulated (1)")
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure every schedule; 1 if one differs from its simulation."""
    args = parse(arguments)
    process = init_distributed(5)
    lengths = make_lognormal(args.median, args.sigma, args.correlation)
    here = Costs(
        EngineModel(StepCost(**{name: args.pace * cost for name, cost in asdict(COST).items()}), args.slots, 10**9),
        process.world_size,
        args.prompts,
        args.group_size,
        PROMPT_TOKENS,
        args.longest,
        lambda tokens: args.pace * args.train_cost * 1e-6 * tokens,
        args.pace * SWITCH_SECONDS,
    )
    fewer = process.world_size / args.trainers  # fewer training ranks take longer
    apart = replace(
        here, num_engines=process.world_size - args.trainers, train=lambda tokens: fewer * here.train(tokens)
    )
    found: dict[str, Any] = {}
    for name, (schedule, measure) in ((name, mode) for name, mode in MODES.items() if args.only in name):
        costs = apart if schedule.own_ranks else here
        simulated = simulate(schedule, costs, lengths, steps=args.steps)
        of_ranks = [0.0] * process.world_size
        dist.all_gather_object(of_ranks, measure(schedule, costs, lengths, args.steps))
        measured = max(of_ranks)
        found[name] = {"measured": measured, "ratio": measured / simulated.seconds, "simulated": asdict(simulated)}
        if process.rank == 0:
            print(f"{name:30} measured {measured:.3f} s per step, simulated {simulated.seconds:.3f}", flush=True)
    if process.rank == 0:
        settings = {name: value for name, value in vars(args).items() if name != "json"} | {"ranks": process.world_size}
        args.json.write_text(json.dumps({"settings": settings, "schedules": found}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return int(any(abs(one["ratio"] - 1) > TOLERANCE for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
