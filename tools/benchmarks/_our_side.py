# SPDX-License-Identifier: Apache-2.0
"""Our side of bench_step_vs_trl.py: one rank, packed microbatches, shared prompts, and a clock.

Only the driver starts it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import torch

from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.roles.actor import Actor
from tools.benchmarks._bench_actor import ALGORITHM, build_bench_actor, build_bench_batch
from tools.benchmarks._step_contest import (
    LEARNING_RATE,
    NUM_UPDATES,
    add_worker_options,
    answer,
    draw_workload,
    wait_for_step,
)


def build_actor(model: Path) -> Actor:
    """An actor on one rank, with Adam and clipping as TRL has them."""
    init_distributed(timeout_minutes=10)
    return build_bench_actor(model, build_groups(ParallelLayout(1)), lr=LEARNING_RATE, adam_beta2=0.999)


def take_step(actor: Actor, options: argparse.Namespace, step: int, device: torch.device) -> dict[str, Any]:
    """Pack, log-probs, updates: the CPU-seconds of each, and the log-probs to compare."""
    work, times = draw_workload(options, step), [time.process_time()]
    batch = build_bench_batch(actor, work, max_tokens=options.max_tokens, share_prompts=True, device=device)
    times.append(time.process_time())
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    times.append(time.process_time())
    for _ in range(NUM_UPDATES):
        actor.forward_backward(batch, ALGORITHM)
        actor.optim_step()
        times.append(time.process_time())
    packing, logprobs, *updates = (b - a for a, b in zip(times, times[1:], strict=False))
    sums = torch.zeros(len(work.lengths) + 1, dtype=torch.float64)  # the last one: of padding
    sums.index_add_(0, batch.sequence_ids % len(sums), batch.old_logprobs.double())
    return {
        "packing": packing,
        "logprobs": logprobs,
        "update": statistics.mean(updates),
        "logprob_sums": sums[:-1].tolist(),
        "tokens_computed": len(batch.tokens),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_worker_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    actor = build_actor(options.model)
    answer({"ready": True})
    for step in range(options.num_steps):
        wait_for_step()
        answer(take_step(actor, options, step, torch.device("cpu")))


if __name__ == "__main__":
    main()
