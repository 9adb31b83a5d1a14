# SPDX-License-Identifier: Apache-2.0
"""Token budget of the reference: whole runs with the actor's, with an equal one and with a smaller one.

Not covered: GPUs, and the memory that a smaller budget saves.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import megatron_rl.run.grpo as trainer_module
from distributed import run_ranks
from megatron_rl.run.inputs import Parts
from megatron_rl.run.loading import load_config
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.roles.frozen import Reference
from rl_runs import leave_out_curves, overrides_for

BUDGET = "reference.max_tokens_per_microbatch"


class CountingReference(Reference):
    """Reference that counts its microbatches."""

    counts: list[int] = []

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        self.counts.append(len(batch.slices))
        return super().compute_logprobs(batch)


def run(rank: int, world_size: int, task: Path, run_dir: Path, *extra: str) -> tuple[list[dict], list[int]]:
    """Train two steps; return the records without times, and the reference's microbatches."""
    leave_out_curves()
    CountingReference.counts.clear()
    given = ("rollout.engine=hf", "data.validation_files=[]", "algorithm.kl_coef=0.1", "trainer.save_final=false")
    config = load_config(None, overrides_for(task, run_dir, *given, *extra)).config
    trainer_module.Trainer.from_config(config, parts=Parts(reference=CountingReference)).train()
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "throughput/", "memory/", "tokens/")
    kept = [{key: value for key, value in record.items() if not key.startswith(timed)} for record in records]
    return kept, [*CountingReference.counts]


def test_a_reference_has_a_budget_of_its_own(task: Path, tmp_path: Path) -> None:
    """An equal budget gives the bits of none; a smaller one splits the reference's passes, not the policy's."""
    ((plain, whole),) = run_ranks(run, 1, task, tmp_path / "plain", timeout=120)
    ((equal, same),) = run_ranks(run, 1, task, tmp_path / "equal", f"{BUDGET}=128", timeout=120)
    assert equal == plain and same == whole and plain[-1]["kl/per_response"] != 0
    ((other, split),) = run_ranks(run, 1, task, tmp_path / "other", f"{BUDGET}=24", timeout=120)
    assert all(more >= 2 * few for more, few in zip(split, whole, strict=True))
    for before, after in zip(plain, other, strict=True):
        assert after["packing/budget_use"] == before["packing/budget_use"]
        assert after["kl/per_response"] == pytest.approx(before["kl/per_response"], rel=1e-3, abs=1e-5)
