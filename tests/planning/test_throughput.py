# SPDX-License-Identifier: Apache-2.0
"""Speed of a step per GPU, by hand; on a CPU without shares of a peak."""

from __future__ import annotations

import pytest

from megatron_rl.planning.throughput import Throughput, count_operations, read_peak
from megatron_rl.run.inputs import plan_rl
from megatron_rl.run.loading import load_config
from planning_jobs import small_shape


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GeForce RTX 2080 Ti", None),
        ("", None),
    ],
)
def test_peaks_of_gpus_by_name(name: str, peak: float | None) -> None:
    assert read_peak(name) == peak


def test_tokens_per_second_and_rank() -> None:
    """Two ranks, one engine of two; 8 prompts of 2 responses in one pass."""
    overrides = ["model.path=m", "data.train_files=[x]", "data.train_batch_size=8", "rollout.n=2"]
    overrides += ["rollout.tensor_model_parallel_size=2", "actor.ppo_mini_batch_size=8", "trainer.total_steps=1"]
    plan, shape = plan_rl(load_config(None, overrides).config, 2), small_shape()
    record = {"tokens/prompt": 160.0, "tokens/response": 320.0, "time/update": 2.0, "time/step": 4.0}
    record |= {"time/rollout": 1.0, "time/ref_logprobs": 0.5}
    expected = {"throughput/update": 120.0, "throughput/rollout": 160.0, "throughput/step": 60.0}
    assert Throughput(plan, shape, None)(record) == expected
    operations = count_operations(shape, 30.0) * 480
    found = Throughput(plan, shape, 1e12)(record)
    assert found["mfu/update"] == pytest.approx(3 * operations / 2 / 2 / 1e12)
    assert found["mfu/rollout"] == pytest.approx(operations / 1 / 2 / 1e12)
    assert found["mfu/step"] == pytest.approx(5 * operations / 4 / 2 / 1e12)
