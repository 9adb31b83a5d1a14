# SPDX-License-Identifier: Apache-2.0
"""Overlap of roles on different ranks: updates of actor and critic, log-probs of two models.

    python tools/make_toy_task.py --out TASK
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tools/benchmarks/bench_placement.py TASK --json FILE

Runs PPO with the actor on rank 0, critic and reference on rank 1. The figure of a pair is its wall time over the slower
role's own time; equal sequential calls give 2. The least loaded step counts. Exit status 1 if a figure is above 1.15.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import torch
import torch.distributed as dist

from megatron_rl import Trainer
from megatron_rl.parallel.collectives import gather_objects, world
from megatron_rl.run.inputs import Parts
from megatron_rl.run.loading import load_config
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.samples.experience import Experience
from megatron_rl.training.roles.actor import Actor
from megatron_rl.training.roles.critic import Critic
from megatron_rl.training.roles.frozen import Reference

LIMIT, WARMUP = 1.15, 2
# Calls that may overlap: (role, call), each on its own ranks.
PAIRS = {
    "updates of actor and critic": (("actor", "update"), ("critic", "update")),
    "log-probs of policy and reference": (("actor", "logprobs"), ("reference", "logprobs")),
}
Call = tuple[str, str, float, float]  # role, call, start and end in seconds of the host's clock
CALLS: list[Call] = []  # this rank's, of the current step
STEPS: list[list[Call]] = []  # all ranks', by step


@contextmanager
def timed(role: str, what: str) -> Iterator[None]:
    """Record a call."""
    start = time.monotonic()
    yield
    CALLS.append((role, what, start, time.monotonic()))


class TimedActor(Actor):
    """An actor with recorded calls."""

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Record the call."""
        with timed("actor", "logprobs"):
            return super().compute_logprobs(batch)

    def forward_backward(self, minibatch: TrainBatch, loss: Any) -> None:
        """Record the call."""
        with timed("actor", "update"):
            super().forward_backward(minibatch, loss)

    def optim_step(self) -> dict[str, float]:
        """Record the call."""
        with timed("actor", "update"):
            return super().optim_step()


class TimedCritic(Critic):
    """A critic with recorded updates."""

    def forward_backward(self, minibatch: TrainBatch) -> None:
        """Record the call."""
        with timed("critic", "update"):
            super().forward_backward(minibatch)

    def optim_step(self) -> dict[str, float]:
        """Record the call."""
        with timed("critic", "update"):
            return super().optim_step()


class TimedReference(Reference):
    """A reference with recorded calls."""

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Record the call."""
        with timed("reference", "logprobs"):
            return super().compute_logprobs(batch)


class TimedTrainer(Trainer):
    """A trainer that separates calls by step."""

    def describe(self, step: int, samples: Experience) -> None:
        """Store the step's calls."""
        STEPS.append([call for mine in gather_objects(CALLS, world()) for call in mine])
        CALLS.clear()
        super().describe(step, samples)


def measure(step: list[Call], pair: tuple[tuple[str, str], ...]) -> dict[str, float]:
    """Return a pair's wall seconds, ratio, and seconds by role."""
    found = {key: [(start, end) for role, what, start, end in step if (role, what) == key] for key in pair}
    both = [span for spans in found.values() for span in spans]
    wall = max(end for _, end in both) - min(start for start, _ in both)
    busy = {role: sum(end - start for start, end in spans) for (role, _), spans in found.items()}
    return {"wall": wall, "ratio": wall / max(busy.values())} | busy


def make_overrides(task: Path, run_dir: str, steps: int) -> list[str]:
    """Return settings of two optimizer steps on 256 responses."""
    return [
        f"model.path={task}/model",
        "model.dtype=float32",
        f"data.train_files=[{task}/train.jsonl]",
        "data.train_batch_size=16",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
        "rollout.engine=hf",
        "rollout.n=16",
        "actor.ppo_mini_batch_size=8",
        "actor.lr=1e-5",
        "critic.lr=1e-5",
        "algorithm.adv_estimator=gae",
        "algorithm.kl_coef=0.01",
        "placement.actor=0",
        "placement.critic=1",
        "placement.reference=1",
        "placement.rollout=0",
        "trainer.val_before_train=false",
        "trainer.save_freq=null",
        f"trainer.total_steps={steps}",
        f"trainer.run_dir={run_dir}",
    ]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path, help="directory of tools/make_toy_task.py")
    parser.add_argument("--steps", type=int, default=12, help=f"steps of the run, {WARMUP} of which do not count (12)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well")
    args = parser.parse_args()
    parts = Parts(actor=TimedActor, critic=TimedCritic, reference=TimedReference)
    with tempfile.TemporaryDirectory() as run_dir:
        config = load_config(None, make_overrides(args.task, f"{run_dir}/run", args.steps)).config
        trainer = TimedTrainer.from_config(config, parts=parts)
        trainer.train()
    found = {}
    for name, pair in PAIRS.items():
        steps = [measure(step, pair) for step in STEPS[WARMUP:]]
        median = statistics.median(step["ratio"] for step in steps)
        found[name] = {"least_loaded": min(steps, key=lambda step: step["ratio"]), "median_ratio": median}
    if trainer.process.rank == 0:
        text = json.dumps(found, indent=1)
        print(text)
        if args.json:
            args.json.write_text(text + "\n", encoding="utf-8")
    return int(any(one["least_loaded"]["ratio"] > LIMIT for one in found.values()))


if __name__ == "__main__":
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
