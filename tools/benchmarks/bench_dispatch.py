# SPDX-License-Identifier: Apache-2.0
"""Rollout time with `rollout.dispatch=groups` against `samples`.

    python tools/benchmarks/bench_dispatch.py --json FILE
    torchrun --standalone --nproc-per-node 8 tools/benchmarks/bench_dispatch.py --json FILE

Lengths are lognormal and correlated within a prompt; a scripted engine's step has a fixed cost, one per request and one
per prefilled token. The first form simulates clocks. Under torchrun, every rank is also an engine that sleeps (lengths
cut to a tenth), and wall time is measured. Samples must be bitwise equal.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import numpy as np

from megatron_rl.config.schema import ActorConfig, DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from megatron_rl.engines.build import BuiltEngine
from megatron_rl.engines.protocol import Request, Sampled, SamplingConfig, derive_seed
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.rollout.generation import assign_engines, generate
from tools.benchmarks._scripted_engine import VOCAB_SIZE, ScriptedEngine
from tools.planning.engine_clock import StepCost

WAYS = ("groups", "samples")
# 8B parameters on one GPU: 7 ms to read the weights, 0.4 ms per request for its KV cache and sampling, 40 us per prompt
# token.
COST = StepCost(fixed=7e-3, per_request=4.2e-4, per_prompt_token=4e-5)
SLEEP_SHARE = 0.1  # share of the lengths, when engines sleep


def draw_lengths(args: argparse.Namespace, seed: int) -> np.ndarray:
    """Draw correlated lognormal lengths [prompts, group_size]."""
    rng, rho = np.random.default_rng(seed), args.correlation
    shared, own = rng.standard_normal((args.prompts, 1)), rng.standard_normal((args.prompts, args.group_size))
    logs = np.log(args.median) + args.sigma * (np.sqrt(rho) * shared + np.sqrt(1 - rho) * own)
    return np.clip(np.exp(logs), 1, args.longest).astype(np.int64)


def make_requests(args: argparse.Namespace, seed: int) -> list[Request]:
    """Make a request per sample."""
    rng = np.random.default_rng(seed + 1000)
    prompts = [
        rng.integers(0, VOCAB_SIZE, int(size), dtype=np.int32)
        for size in rng.integers(args.prompt // 2, args.prompt * 3 // 2, args.prompts)
    ]
    sampling = SamplingConfig(temperature=1.0, max_tokens=args.longest, stop_token_ids=())
    return [
        Request(
            index,
            prompts[index // args.group_size],
            derive_seed(seed, 1, index // args.group_size, index % args.group_size),
            sampling,
        )
        for index in range(args.prompts * args.group_size)
    ]


def simulate(args: argparse.Namespace, seed: int, dispatch: str) -> tuple[float, list[Sampled]]:
    """Return the slowest engine's seconds, and the samples."""
    lengths = dict(enumerate(draw_lengths(args, seed).reshape(-1).tolist()))
    requests = make_requests(args, seed)
    prompts = [len(request.tokens) for request in requests[:: args.group_size]]
    engine_of = assign_engines(dispatch, prompts, args.group_size, args.engines, args.longest)
    seconds, sampled = 0.0, []
    for number in range(args.engines):
        engine = ScriptedEngine(lengths, args.slots, COST)
        sampled += generate(engine, [requests[index] for index in np.flatnonzero(engine_of == number)])
        seconds = max(seconds, engine.seconds)
    return seconds, sorted(sampled, key=lambda one: one.key)


def is_same(one: list[Sampled], other: list[Sampled]) -> bool:
    """Whether responses are bitwise equal."""
    return len(one) == len(other) and all(
        (a.key, a.finish_reason, a.tokens.tobytes(), a.logprobs.tobytes())
        == (b.key, b.finish_reason, b.tokens.tobytes(), b.logprobs.tobytes())
        for a, b in zip(one, other, strict=True)
    )


def compare(
    run: Callable[[int, str], tuple[float, Any]], same: Callable[[Any, Any], bool], seeds: int
) -> dict[str, Any]:
    """Run both ways on equal lengths."""
    rows = []
    for seed in range(seeds):
        (slow, one), (fast, other) = (run(seed, way) for way in WAYS)
        rows.append(
            {
                "seed": seed,
                "seconds_groups": slow,
                "seconds_samples": fast,
                "ratio": slow / fast,
                "same_samples": same(one, other),
            }
        )
    return {
        "ratio": statistics.median(row["ratio"] for row in rows),
        "same_samples": all(row["same_samples"] for row in rows),
        "runs": rows,
    }


def make_real_run(args: argparse.Namespace) -> Callable[[int, str], tuple[float, Any]]:
    """Return a run on all ranks with sleeping engines; collective."""
    import torch.distributed as dist

    from megatron_rl.observability.progress import RolloutProgress
    from megatron_rl.rollout.episodes import SampleGroups
    from megatron_rl.rollout.generation import Channel, RolloutGenerator
    from megatron_rl.types import Prompt

    weights = SimpleNamespace(policy_version=0, shape=SimpleNamespace(vocab_size=VOCAB_SIZE))

    def run(seed: int, dispatch: str) -> tuple[float, Any]:
        lengths = np.maximum(1, draw_lengths(args, seed).reshape(-1) * SLEEP_SHARE).astype(int)
        requests = make_requests(args, seed)
        prompts = [
            Prompt(number, request.tokens, "", "") for number, request in enumerate(requests[:: args.group_size])
        ]
        engine = ScriptedEngine(dict(enumerate(lengths.tolist())), args.slots, COST, time.sleep)
        config = RunConfig(
            model=ModelConfig(path=""),
            data=DataConfig(train_files=[], train_batch_size=1),
            actor=ActorConfig(),
            rollout=RolloutConfig(dispatch=dispatch),
            trainer=TrainerConfig(seed=seed),
        )
        generator = RolloutGenerator(
            BuiltEngine(engine, None, "ScriptedEngine", EngineRanks.consecutive(range(dist.get_world_size()), 1)),
            weights,
            Channel(),
            config=config,
            group=dist.group.WORLD,
            progress=RolloutProgress(),
        )
        dist.barrier()
        start = time.perf_counter()
        generated = generator.generate(SampleGroups(prompts, args.group_size, requests[0].sampling, step=1))
        seconds = time.perf_counter() - start  # ends with a collective, so it is the slowest rank's
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            parts,
            {
                index: (rollout.response_tokens.tobytes(), rollout.rollout_logprobs.tobytes())
                for index, rollout in generated.items()
            },
        )
        return seconds, {index: found for part in parts for index, found in part.items()}

    return run


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=16, help="simulated engines (default 16); measured are ranks")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step (default 32)")
    parser.add_argument("--group-size", type=int, default=16, help="responses per prompt (default 16)")
    parser.add_argument("--median", type=float, default=200.0, help="tokens of the median response (default 200)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lengths' logarithm (default 1)")
    parser.add_argument("--correlation", type=float, default=0.5, help="inside of a prompt (default 0.5)")
    parser.add_argument("--longest", type=int, default=800, help="longest response, tokens (default 800)")
    parser.add_argument("--prompt", type=int, default=50, help="tokens of the mean prompt (default 50)")
    parser.add_argument("--slots", type=int, default=16, help="requests that an engine runs at once (default 16)")
    parser.add_argument("--seeds", type=int, default=5, help="sets of lengths; the median ratio counts (default 5)")
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Compare both ways; 1 if samples differ."""
    args = parse(arguments)
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    found: dict[str, Any] = {
        "settings": settings,
        "simulated": compare(lambda seed, way: simulate(args, seed, way), is_same, args.seeds),
    }
    is_writer = True
    if "RANK" in os.environ:
        from megatron_rl.parallel.collectives import init_distributed

        process = init_distributed(5)
        is_writer = process.rank == 0
        found["measured"] = {"ranks": process.world_size} | compare(make_real_run(args), operator.eq, args.seeds)
    if is_writer:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
        for name in ("simulated", "measured"):
            if name in found:
                print(f"{name}: whole groups take {found[name]['ratio']:.2f} times as long as spread samples")
    return 0 if all(found[name]["same_samples"] for name in found if name != "settings") else 1


if __name__ == "__main__":
    sys.exit(main())
