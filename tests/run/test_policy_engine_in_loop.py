# SPDX-License-Identifier: Apache-2.0
"""A run whose rollouts come from the policy's own modules, in a layout that vLLM cannot share storage with.

The same engine alone is in tests/training/test_policy_engine.py. Not covered: GPUs.
"""

from __future__ import annotations

from pathlib import Path

from distributed import run_ranks
from rl_runs import overrides_for, read_records, train


def test_rollouts_from_the_policy_itself(task: Path, tmp_path: Path) -> None:
    """GRPO on TP2 x PP2 without sequence parallelism, validation included: nothing moves, and nothing disagrees."""
    overrides = overrides_for(
        task,
        tmp_path / "run",
        "rollout.engine=megatron",
        "rollout.max_num_seqs=5",
        "actor.tensor_model_parallel_size=2",
        "actor.pipeline_model_parallel_size=2",
        "trainer.total_steps=3",
        "hybrid.verify=full",
    )
    assert run_ranks(train, 4, overrides, timeout=150) == [None] * 4
    records = read_records(tmp_path / "run")
    steps = [record for record in records if "mismatch/max" in record]
    assert len(steps) == 3 and all("reward/mean" in record for record in steps)
    for record in steps:
        assert 0 <= record["mismatch/max"] < 1e-5
        assert record["reshard/bytes_moved"] == record["reshard/bytes_copied"] == 0 < record["reshard/bytes_aliased"]
    assert any("validation/validation/accuracy" in record for record in records)
