# SPDX-License-Identifier: Apache-2.0
"""Seconds and memory per phase of a step.

Phases accumulate until `pop`. An outer phase includes its inner phases, which are also counted on their own unless the
outer phase swallows them: generation and scoring in a validation are not rollout or reward time of the step.

Selected steps are profiled on selected ranks: torch's profiler, CUDA memory history, and a named range per phase.

    <run_dir>/profile/step_<N>_rank_<R>.json.gz      for chrome://tracing or ui.perfetto.dev
    <run_dir>/profile/step_<N>_rank_<R>.pickle       for pytorch.org/memory_viz (CUDA only)

On CUDA every step also has NVTX ranges for Nsight Systems.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch


class PhaseTimers:
    """Wall time and memory by phase, with a monotonic clock in seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, int] = {}
        self._swallowing = 0
        self.memory_probe: Callable[[], int] | None = None  # returns bytes in use, at the end of each phase
        self.annotate: Callable[[str], AbstractContextManager[None]] | None = None  # a named range for profilers
        self.step = self.num_entered = 0  # phases entered so far, in the same order on all ranks
        self.memory = 0  # last result of the probe, in bytes
        self.phases: list[str] = []  # current ones, the outermost first
        self.began: list[float] = []  # their starts, in seconds of the clock

    def attach(
        self, memory_probe: Callable[[], int], annotate: Callable[[str], AbstractContextManager[None]] | None
    ) -> None:
        """Set `memory_probe` (returns bytes in use) and `annotate` (opens a profiler's range), for every phase."""
        self.memory_probe, self.annotate = memory_probe, annotate

    def begin_step(self, step: int) -> None:
        """Set the step of the phases that follow."""
        self.step = step

    @contextmanager
    def phase(self, name: str, *, swallow: bool = False) -> Iterator[None]:
        """Count the seconds of the block under `name`; `swallow` suppresses inner phases."""
        start, is_counted = self._clock(), not self._swallowing
        self._swallowing += swallow
        self.num_entered += 1
        self.phases.append(name)
        self.began.append(start)
        try:
            with self.annotate(name) if self.annotate else nullcontext():
                yield
        except BaseException as error:
            if not hasattr(error, "left_phase") and name != "step":
                vars(error)["left_phase"] = name  # for the report of the failure
            raise
        finally:
            self.phases.pop()
            self.began.pop()
            self._swallowing -= swallow
            if is_counted:
                self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start
                if self.memory_probe is not None:
                    self.memory = self.memory_probe()
                    self._bytes[name] = max(self._bytes.get(name, 0), self.memory)

    def current(self) -> tuple[str, float]:
        """Return the current phases and the seconds in the innermost one; may be called by another thread."""
        going = [item for item in zip(tuple(self.phases), tuple(self.began)) if item[0] != "step"]
        if not going:
            return "between phases", 0.0
        return ", ".join(name for name, _ in going), self._clock() - going[-1][1]

    def watch(self, role: Any, **phases: str) -> Any:
        """Return a proxy of `role` that counts methods as phases: `watch(actor, update="update")`."""
        return _Watched(role, self, phases)

    def seen(self) -> dict[str, float]:
        """Return seconds by `time/<name>` and bytes by `memory/<name>` since the last `pop`."""
        record: dict[str, float] = {f"time/{name}": value for name, value in self._seconds.items()}
        return record | {f"memory/{name}": value for name, value in self._bytes.items()}

    def complete(self, seen: Mapping[str, float]) -> None:
        """Replace values of this step by another rank's if larger: that rank may have a role that this one lacks."""
        for name, value in seen.items():
            kind, _, phase = name.partition("/")
            table: dict[str, Any] = self._seconds if kind == "time" else self._bytes
            table[phase] = max(table.get(phase, 0), value)

    def pop(self) -> dict[str, float]:
        """Return the metrics time/<phase> and memory/<phase> since the last call."""
        record = self.seen()
        self._seconds.clear()
        self._bytes.clear()
        return record


class _Watched:
    __slots__ = ("_phases", "_role", "_timers")  # another attribute would not reach the role

    def __init__(self, role: Any, timers: PhaseTimers, phases: dict[str, str]) -> None:
        self._role, self._timers, self._phases = role, timers, phases

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._role, name)
        if name not in self._phases:
            return value

        @functools.wraps(value)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._timers.phase(self._phases[name]):
                return value(*args, **kwargs)

        return counted


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
