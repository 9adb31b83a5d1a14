# SPDX-License-Identifier: Apache-2.0
"""CPU time of Python and numpy per step on one data parallel rank, without model and communication.

    OMP_NUM_THREADS=1 python tools/benchmarks/bench_host_work.py --ranks 8 128 1024 --sequences 512 8192 --json FILE

Covers the host work of `run/grpo.py`: headers of all sequences, minibatch plans, token exchange, this replica's batch,
dispatch, group baselines and metrics.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import numpy as np
import torch

from megatron_rl.config.schema import AlgorithmConfig, LayoutConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.rollout.order import assign_engines
from megatron_rl.samples.describe import describe_rollouts
from megatron_rl.samples.fetch import Holders, plan_fetch
from megatron_rl.samples.pack import Packer
from megatron_rl.samples.table import HEADER, Headers, build_headers
from megatron_rl.types import Branch, Prompt, Rollout, Turn

GROUP_SIZE = 8
PROMPT, LONGEST = 64, 256  # tokens: short sequences, to leave little else to do


@dataclass(frozen=True)
class HostStep:
    """A step of `num_sequences` on `dp_size` replicas as seen by one rank."""

    num_sequences: int
    dp_size: int
    share_prompts: bool = False
    num_minibatches: int = 4
    max_tokens: int = 16384

    def measure(self) -> dict[str, float]:
        """Return CPU-seconds by part."""
        random, seconds = np.random.default_rng(0), {}

        def timed(name: str, action: Any) -> Any:
            start = time.process_time()
            found = action()
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - start
            return found

        responses = np.minimum(random.lognormal(4, 0.8, self.num_sequences), LONGEST - PROMPT - 2).astype(int)
        lengths = PROMPT + 1 + responses
        groups = self.num_sequences // GROUP_SIZE
        engine_of = timed(
            "dispatch", lambda: assign_engines("samples", [PROMPT] * groups, GROUP_SIZE, self.dp_size, LONGEST)
        )
        headers = self._make_headers(lengths, engine_of, random)
        mine = np.flatnonzero(engine_of == 0)
        rollouts = {index: _make_rollout(index, int(lengths[index])) for index in mine.tolist()}
        timed("headers", lambda: build_headers(((i // GROUP_SIZE, r) for i, r in rollouts.items()), holder=0))
        ranks = np.arange(self.dp_size)[:, None]
        branches = {length: _make_branch(length) for length in np.unique(lengths).tolist()}

        def fetch(destination: Holders) -> Mapping[int, Branch]:
            plan = timed("fetch plan", lambda: plan_fetch(0, Holders(engine_of, ranks), destination))
            return {index: branches[lengths[index]] for index in plan.sequences.tolist()}

        packing = timed("packing", lambda: self._build_packer().pack(headers, fetch))
        seconds["packing"] -= seconds["fetch plan"]
        timed("metrics", lambda: describe_rollouts(headers))
        scores = np.split(headers["reward"], groups)
        timed("advantages", lambda: [part - part.mean() for part in scores] and packing)
        return seconds

    def _make_headers(self, lengths: np.ndarray, engine_of: np.ndarray, random: np.random.Generator) -> Headers:
        rows = np.zeros(self.num_sequences, HEADER)
        rows["num_tokens"], rows["num_prompt_tokens"] = lengths, PROMPT
        rows["num_sampled"], rows["in_loss"] = lengths - PROMPT, True
        rows["rollout"] = np.arange(self.num_sequences)
        rows["group"] = rows["prompt_id"] = rows["rollout"] // GROUP_SIZE
        rows["sample_index"], rows["holder"] = rows["rollout"] % GROUP_SIZE, engine_of
        rows["reward"] = random.integers(0, 2, self.num_sequences)
        return Headers(rows, ("score",), rows["reward"][:, None])

    def _build_packer(self) -> Packer:
        model: Any = SimpleNamespace(
            layout=ParallelLayout(world_size=self.dp_size),
            dp_rank=0,
            buckets=None,
            pad_multiple=1,
            attention_ratio=1e-4,
            microbatch_count_multiple=1,
        )
        plan: Any = SimpleNamespace(
            rollouts_per_minibatch=self.num_sequences // self.num_minibatches,
            longest_sequence=LONGEST,
            max_response_length=LONGEST - PROMPT,
        )
        config = LayoutConfig(max_tokens_per_microbatch=self.max_tokens, share_prompts=self.share_prompts)
        return Packer(model, config, plan, AlgorithmConfig(), torch.device("cpu"))


def _make_branch(length: int) -> Branch:
    sampled = np.arange(length) >= PROMPT
    return Branch(np.zeros(length, np.int32), sampled, np.zeros(length, np.float32), sampled.astype(np.int32), PROMPT)


def _make_rollout(index: int, length: int) -> Rollout:
    prompt = Prompt(index // GROUP_SIZE, np.zeros(PROMPT, np.int32), "", None)
    turns = [Turn(0, PROMPT, length)]
    return Rollout(prompt, index % GROUP_SIZE, [_make_branch(length)], turns, "stop", reward=0.0)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64], help="DP replicas (1 8 64)")
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[512, 4096, 65536], help="per step (512 4096 65536)"
    )
    parser.add_argument("--minibatches", type=int, default=4, help="of a step (4)")
    parser.add_argument("--json", type=Path, help="write the result here as well", metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gc.freeze()  # as a run does after its imports
    rows = []
    for ranks in options.ranks:
        for sequences in options.sequences:
            for share in (False, True):
                parts = HostStep(sequences, ranks, share, options.minibatches).measure()
                rows.append({"ranks": ranks, "sequences": sequences, "share_prompts": share, **parts})
                rows[-1]["cpu_seconds"] = sum(parts.values())
    print(json.dumps(rows, indent=2))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
