# SPDX-License-Identifier: Apache-2.0
"""Traces of the chosen steps on the chosen ranks, with the phases in them. Memory snapshots and NVTX need CUDA."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from megatron_rl.observability.progress import PhaseTimers, StepProfiler

CPU = torch.device("cpu")


def run_steps(profiler: StepProfiler) -> None:
    """Three steps of one phase."""
    timers = PhaseTimers()
    timers.attach(lambda: 0, profiler.phase)
    for step in (1, 2, 3):
        with profiler.step(step), timers.phase("update"):
            torch.ones(8).cos()


def test_only_the_chosen_steps_are_traced(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, steps=[2], ranks=[0, 3], rank=3, device=CPU)
    run_steps(profiler)
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "step_2_rank_3.json.gz" and profiler.is_used
    names = [event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
    assert names.count("update") == 1 and "aten::cos" in names


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, steps=[2], ranks=[0], rank=1, device=CPU)
    run_steps(profiler)
    assert not (tmp_path / "profile").exists() and not profiler.is_used


def test_trace_is_written_when_the_step_fails(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, steps=[1], ranks=[0], rank=0, device=CPU)
    with pytest.raises(ZeroDivisionError), profiler.step(1):
        torch.ones(8).cos()
        1 / 0
    assert (tmp_path / "profile" / "step_1_rank_0.json.gz").exists()
