# SPDX-License-Identifier: Apache-2.0
"""Speed of a step per GPU, by hand; on a CPU without shares of a peak."""

from __future__ import annotations

import pytest

from megatron_rl.planning.throughput import Throughput, count_operations, read_peak
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
    shape, ranks = small_shape(), {"update": 2, "step": 2, "rollout": 2}
    record = {"tokens/prompt": 160.0, "tokens/response": 320.0, "time/update": 2.0, "time/step": 4.0}
    record |= {"time/rollout": 1.0, "time/ref_logprobs": 0.5}
    expected = {"throughput/update": 120.0, "throughput/rollout": 160.0, "throughput/step": 60.0}
    assert Throughput(shape, None, sequences=16, epochs=1, ranks=ranks)(record) == expected
    operations = count_operations(shape, 30.0) * 480
    found = Throughput(shape, 1e12, sequences=16, epochs=1, ranks=ranks)(record)
    assert found["mfu/update"] == pytest.approx(3 * operations / 2 / 2 / 1e12)
    assert found["mfu/rollout"] == pytest.approx(operations / 1 / 2 / 1e12)
    assert found["mfu/step"] == pytest.approx(5 * operations / 4 / 2 / 1e12)
