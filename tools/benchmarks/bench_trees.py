# SPDX-License-Identifier: Apache-2.0
"""Seconds of log-probs and updates on forking episodes: whole branches, shared prompts, prefix trees.

    OMP_NUM_THREADS=1 python tools/benchmarks/bench_trees.py --json FILE

An episode has several conversations (`--ways`) of several turns (`--turns`) on one prompt. Chat templates drop a turn's
thoughts from later contexts, so each turn is its own branch. Seconds are process CPU-seconds on a CPU and wall seconds
on a GPU, summed over ranks; `tokens_unique` counts distinct branch prefixes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.schema import LayoutConfig
from megatron_rl.parallel.collectives import init_distributed, reduce_scalars, share_object
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import Packer, Packing, expand_to_tokens
from megatron_rl.samples.experience import replicate
from megatron_rl.training.roles.actor import Actor
from megatron_rl.types import Branch, Prompt, Rollout
from tools.benchmarks._bench_actor import ALGORITHM, Stopwatch, build_bench_actor, write_random_model
from tools.benchmarks.bench_long import MODEL

ARMS: dict[str, Any] = {"whole": False, "shared prompts": True, "prefix trees": "tree"}


@dataclass(frozen=True)
class ForkedEpisodes:
    """One group of episodes.

    Attributes:
        samples: episodes per group.
        ways: conversations per episode.
        turns: per conversation.
        prompt, observation: tokens.
        thoughts, answer: sampled tokens per turn; later turns see only the answer.
    """

    samples: int = 2
    ways: int = 8
    turns: int = 8
    prompt: int = 64
    thoughts: int = 32
    answer: int = 16
    observation: int = 48

    def draw(self, vocab_size: int, seed: int = 0) -> list[tuple[int, Rollout]]:
        """Draw rollouts with branches by turn, then by way."""
        random = np.random.default_rng(seed)

        def draw(count: int) -> np.ndarray:
            return random.integers(0, vocab_size, count).astype(np.int32)

        prompt = Prompt(0, draw(self.prompt), "", None)
        rollouts = []
        for sample in range(self.samples):
            contexts, branches = [prompt.tokens] * self.ways, []
            for _ in range(self.turns):
                for way, context in enumerate(contexts):
                    thoughts, answer = draw(self.thoughts), draw(self.answer)
                    tokens = np.concatenate([context, thoughts, answer])
                    sampled = np.arange(len(tokens)) >= len(context)
                    zeros = np.zeros(len(tokens), np.float32)
                    branches.append(Branch(tokens, sampled, zeros, zeros.astype(np.int32), len(prompt.tokens)))
                    contexts[way] = np.concatenate([context, answer, draw(self.observation)])
            rollouts.append((0, Rollout(prompt, sample, branches, [], "stop", reward=float(sample))))
        return rollouts


def count_unique_tokens(rollouts: list[tuple[int, Rollout]]) -> int:
    """Count nodes of the prefix tree."""
    branches = [branch.tokens for _, rollout in rollouts for branch in rollout.branches]
    return len({tokens[:stop].tobytes() for tokens in branches for stop in range(1, len(tokens) + 1)})


def pack_rollouts(actor: Actor, rollouts: list[tuple[int, Rollout]], share: Any, budget: int) -> Packing:
    """Pack this rank's share of one minibatch; collective.

    Args:
        rollouts: one group, equal on every rank.
        share: `actor.share_prompts`.
        budget: tokens of a micro-batch.
    """
    longest = max(len(branch.tokens) for _, rollout in rollouts for branch in rollout.branches)
    plan: Any = SimpleNamespace(
        rollouts_per_minibatch=len(rollouts), longest_sequence=longest, max_response_length=longest
    )
    samples = replicate(rollouts, [rollouts[0][1].prompt], dist.group.WORLD)
    config = LayoutConfig(max_tokens_per_microbatch=budget, share_prompts=share)
    return samples.pack(Packer(actor.model, config, plan, ALGORITHM, actor.model.device))


class Arm:
    """One way to pack the episodes; collective."""

    def __init__(self, name: str, path: Path, options: argparse.Namespace, rollouts: list[tuple[int, Rollout]]) -> None:
        groups = build_groups(ParallelLayout(dist.get_world_size(), cp_size=options.cp))
        self._actor = build_bench_actor(path, groups, options.dtype)
        packing = pack_rollouts(self._actor, rollouts, ARMS[name], options.budget)
        self._batch = packing.batch
        computed = sum(microbatch.num_computed for microbatch in self._batch.microbatches())
        totals = reduce_scalars({"computed": computed}, dist.ReduceOp.SUM, dist.group.WORLD, self._batch.tokens.device)
        self.row: dict[str, Any] = {
            "arm": name,
            "tokens": sum(len(branch.tokens) for _, rollout in rollouts for branch in rollout.branches),
            "tokens_computed": int(totals["computed"]) // options.cp,
            "tokens_unique": count_unique_tokens(rollouts),
            "microbatches": len(self._batch.slices),
            "imbalance": packing.metrics["packing/imbalance"],
            "logprob_seconds": [],
            "update_seconds": [],
        }

    def measure(self) -> None:
        """Time log-probs and an update."""
        actor, batch = self._actor, self._batch
        watch = Stopwatch(batch.tokens.device)
        logprobs = actor.compute_logprobs(batch)
        self.row["logprob_seconds"].append(self._read(watch))
        advantages = expand_to_tokens(np.cos(np.arange(int(batch.sequence_ids.max()) + 1)), batch)
        batch = replace(batch, old_logprobs=logprobs, advantages=advantages)
        watch = Stopwatch(batch.tokens.device)
        actor.forward_backward(batch, ALGORITHM)
        actor.optim_step()
        self.row["update_seconds"].append(self._read(watch))

    def _read(self, watch: Stopwatch) -> float:
        wall, cpu = watch.read()
        device = self._batch.tokens.device
        seconds = {"seconds": wall if device.type == "cuda" else cpu}
        return reduce_scalars(seconds, dist.ReduceOp.SUM, dist.group.WORLD, device)["seconds"]


def measure_arms(options: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Return the rows of all arms; collective."""
    init_distributed(timeout_minutes=30)
    path = Path(share_object(str(directory), dist.group.WORLD, 0))
    if dist.get_rank() == 0:
        write_random_model(path, MODEL | {"vocab_size": options.vocab})
    dist.barrier()
    episodes = ForkedEpisodes(options.samples, options.ways, options.turns)
    rollouts = episodes.draw(options.vocab, options.seed)
    arms = [Arm(name, path, options, rollouts) for name in ARMS]
    for number in range(options.rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            arm.measure()
    base = arms[0].row
    for row in (arm.row for arm in arms):
        for kind in ("logprob", "update"):
            seconds = f"{kind}_seconds"
            row[f"{kind}_speedup"] = statistics.median(base[seconds]) / statistics.median(row[seconds])
    return [arm.row for arm in arms]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2, help="episodes of the group (2)")
    parser.add_argument("--ways", type=int, default=8, help="conversations of an episode (8)")
    parser.add_argument("--turns", type=int, default=8, help="of each (8)")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a microbatch (8192)")
    parser.add_argument("--vocab", type=int, default=16384, help="vocabulary (16384)")
    parser.add_argument("--cp", type=int, default=1, help="context parallel size (1)")
    parser.add_argument("--rounds", type=int, default=2, help="each measures every arm once (2)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the rows", metavar="FILE")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as directory:
            rows = measure_arms(options, Path(directory))
            is_first = dist.get_rank() == 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if is_first:
        print(json.dumps(rows, indent=2))
        if options.json:
            options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
