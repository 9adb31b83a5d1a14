# SPDX-License-Identifier: Apache-2.0
"""Profiles of selected steps on selected ranks: torch's profiler, CUDA memory history, and a named range per phase.

    <run_dir>/profile/step_<N>_rank_<R>.json.gz      for chrome://tracing or ui.perfetto.dev
    <run_dir>/profile/step_<N>_rank_<R>.pickle       for pytorch.org/memory_viz (CUDA only)

On CUDA every step also has NVTX ranges for Nsight Systems.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

_MAX_MEMORY_EVENTS = 100_000


class StepProfiler:
    """Profiler of selected steps on this rank."""

    def __init__(
        self, directory: Path, *, steps: Sequence[int], ranks: Sequence[int], rank: int, device: torch.device
    ) -> None:
        self._directory, self._steps = directory / "profile", frozenset(steps) if rank in ranks else frozenset()
        self._rank, self._is_cuda = rank, device.type == "cuda"

    @property
    def is_used(self) -> bool:
        """Whether ranges are recorded on this rank."""
        return bool(self._steps) or self._is_cuda

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark the block as a named range."""
        with torch.profiler.record_function(name), torch.cuda.nvtx.range(name) if self._is_cuda else nullcontext():
            yield

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block if step `number` is selected, writing files even after an error."""
        if number not in self._steps:
            yield
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        target = self._directory / f"step_{number}_rank_{self._rank}"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._is_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)
        profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        profiler.start()
        try:
            yield
        finally:
            profiler.stop()
            profiler.export_chrome_trace(str(target.with_suffix(".json.gz")))
            if self._is_cuda:
                torch.cuda.memory._dump_snapshot(str(target.with_suffix(".pickle")))
                torch.cuda.memory._record_memory_history(enabled=None)
