# SPDX-License-Identifier: Apache-2.0
"""Our side of bench_step_vs_trl.py, on one rank; in the workload "rollouts" the whole program with vLLM."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import torch

from megatron_rl.parallel.collectives import current_device, init_distributed
from megatron_rl.parallel.groups import ParallelGroups, build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.run.grpo import Trainer
from megatron_rl.training.roles.actor import Actor
from tools.benchmarks._bench_actor import ALGORITHM, build_bench_actor, build_bench_batch
from tools.benchmarks._step_contest import (
    KL_COEF,
    LEARNING_RATE,
    NUM_UPDATES,
    SMALL_LEARNING_RATE,
    WORKLOADS,
    add_worker_options,
    answer,
    draw_prompts,
    draw_workload,
    read_clock,
    score_text,
    wait_for_step,
)


def build_actor(options: argparse.Namespace, groups: ParallelGroups) -> Actor:
    """Build an actor with TRL's Adam and clipping, and unchunked logits."""
    chunk = options.max_tokens
    return build_bench_actor(options.model, groups, lr=LEARNING_RATE, adam_beta2=0.999, logprob_chunk_tokens=chunk)


def take_step(
    actor: Actor, options: argparse.Namespace, step: int, device: torch.device, reference: Actor | None = None
) -> dict[str, Any]:
    """Return the CPU-seconds of packing and update, and the log-probs of the first update.

    With a reference, update seconds are the sum over epochs, otherwise their mean.
    """
    algorithm = replace(ALGORITHM, kl_coef=KL_COEF) if reference else ALGORITHM
    work, times = draw_workload(options, step), [read_clock()]
    batch = build_bench_batch(actor, work, max_tokens=options.max_tokens, shares_prompts=True, device=device)
    times.append(read_clock())
    room = torch.zeros_like(batch.rollout_logprobs)
    batch = replace(batch, update_logprobs=room, update_entropy=room.clone())
    if reference is not None:
        batch = replace(batch, ref_logprobs=reference.compute_logprobs(batch))
    times.append(read_clock())
    for _ in range(NUM_UPDATES):
        actor.forward_backward(batch, algorithm)
        actor.optim_step()
        if batch.old_logprobs is None:
            batch = replace(batch, old_logprobs=room.clone())
        times.append(read_clock())
    packing, of_reference, *updates = (b - a for a, b in zip(times, times[1:], strict=False))
    sums = torch.zeros(len(work.lengths) + 1, dtype=torch.float64)  # last entry: padding
    sums.index_add_(0, batch.sequence_ids.cpu() % len(sums), batch.column("old_logprobs").double().cpu())
    return {
        "packing": packing,
        "reference": of_reference,
        "update": (sum if reference else statistics.mean)(updates),
        "logprob_sums": sums[:-1].tolist(),
        "tokens_computed": len(batch.tokens),
    }


class WholeProgram(Trainer):
    """The main loop with steps on request."""

    def steps(self) -> Iterator[int]:
        """Take a step per request and report its seconds."""
        answer({"ready": True})
        start = None
        for step in super().steps():
            if start is not None:
                seconds = read_clock() - start
                answer({"whole": seconds, "logprob_sums": [], "tokens_computed": self.tokens})
            wait_for_step()
            start = read_clock()
            yield step

    def describe(self, step: int, samples: Any) -> None:
        """Count sampled tokens."""
        super().describe(step, samples)
        self.tokens = int(samples.headers.num_response_tokens.sum())


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Compute the reward, with verl's signature."""
    return score_text(solution_str)


def run_whole_program(options: argparse.Namespace) -> None:
    """Take steps until the driver ends the process; no timed step is the last planned one."""
    prompt, longest, _ = WORKLOADS[options.workload]
    options.num_steps += 1
    prompts = options.model / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in draw_prompts(options)))
    config = {
        "model": {"dtype": "float32"},
        "data": {
            "train_files": [str(prompts)],
            "train_batch_size": options.prompts,
            "max_prompt_length": prompt,
            "max_response_length": longest,
        },
        "actor": {
            "ppo_mini_batch_size": options.prompts,
            "max_tokens_per_microbatch": options.max_tokens,
            "logprob_chunk_tokens": options.max_tokens,
            "lr": SMALL_LEARNING_RATE,
            "adam_beta2": 0.999,
            "weight_decay": 0.0,
        },
        "rollout": {"engine": "vllm", "n": options.samples},
        "trainer": {"total_steps": options.num_steps, "run_dir": str(options.model / "run")},
    }
    WholeProgram.from_hf_config(options.model, config, reward=score).train()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_worker_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.workload == "rollouts":
        run_whole_program(options)
        return
    init_distributed(timeout_minutes=10)
    groups = build_groups(ParallelLayout(1))
    actor = build_actor(options, groups)
    reference = build_actor(options, groups) if options.workload == "reference" else None
    answer({"ready": True})
    for step in range(options.num_steps):
        wait_for_step()
        answer(take_step(actor, options, step, current_device(), reference))


if __name__ == "__main__":
    main()
