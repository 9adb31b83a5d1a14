# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: responses of generations, pace, a log file per rank, seconds and memory per phase (`console.py`).

The logger is the package's own, so every module's `logging.getLogger(__name__)` writes to the file.

Phases accumulate until `pop`. An outer phase includes its inner phases, which are also counted on their own unless the
outer phase swallows them: generation and scoring in a validation are not rollout or reward time of the step.

Selected steps are profiled on selected ranks: torch's profiler, CUDA memory history, and a named range per phase.

    <run_dir>/profile/step_<N>_rank_<R>.json.gz      for chrome://tracing or ui.perfetto.dev
    <run_dir>/profile/step_<N>_rank_<R>.pickle       for pytorch.org/memory_viz (CUDA only)

On CUDA every step also has NVTX ranges for Nsight Systems.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import Store

from megatron_rl.observability.metrics import log_path

if TYPE_CHECKING:
    from megatron_rl.observability.spans import Spans

_INTERVAL = 0.5  # seconds between two updates
_WINDOW = 20  # updates that the speed is averaged over


@dataclass(frozen=True)
class RolloutCount:
    """Progress of a generation over all engines."""

    finished: int
    total: int
    tokens: int  # sampled tokens, unfinished responses included
    tokens_per_second: float  # mean of the last ten seconds
    seconds: float


Show = Callable[[RolloutCount | None], None]


class RolloutProgress:
    """Counter of the responses of generations; every rank makes the same calls.

    Args:
        store: shared by all ranks; `None` disables counting.
        show: on the displaying rank; called by another thread with the progress, and with `None` at the end.
        spans: of requests and episodes, if they are recorded.
    """

    def __init__(self, store: Store | None = None, show: Show | None = None, spans: Spans | None = None) -> None:
        self._store, self._show, self.spans = store, show, spans
        self._generation = self._finished = self._tokens = 0
        self._added = (0, 0)

    def count(self, num_tokens: int) -> None:
        """Count a finished response of this rank's engine."""
        self._finished += 1
        self._tokens += num_tokens

    @contextmanager
    def follow(self, total: int, tokens_in_flight: Callable[[], int] | None) -> Iterator[None]:
        """Report progress while the block generates, by a thread that sums the counts of all engines.

        Args:
            total: responses of all engines.
            tokens_in_flight: returns the tokens of unfinished responses of this rank's engine, in another thread;
                `None` on a rank that does not report for an engine.
        """
        self._generation += 1
        if self._store is None or tokens_in_flight is None:
            yield
            return
        self._finished = self._tokens = 0
        self._added = (0, 0)
        over = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(self._store, over, total, tokens_in_flight), name="rollout progress", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, store: Store, over: threading.Event, total: int, tokens_in_flight: Callable[[], int]) -> None:
        start = time.monotonic()
        looks = deque([(start, 0)], maxlen=_WINDOW)
        try:
            is_over = False
            while not is_over:
                is_over = over.wait(_INTERVAL)  # one more update at the end, for the last responses
                mine = self._finished, self._tokens  # read first, else a response could count twice
                mine = mine[0], mine[1] + tokens_in_flight()
                finished, tokens = (
                    store.add(f"{self._generation}/{name}", now - before)
                    for name, now, before in zip(("finished", "tokens"), mine, self._added, strict=True)
                )
                self._added = mine
                now = time.monotonic()
                speed = (tokens - looks[0][1]) / (now - looks[0][0])
                looks.append((now, tokens))
                if self._show is not None:
                    self._show(RolloutCount(finished, total, tokens, max(0.0, speed), now - start))
        except Exception as error:  # the store is gone; the run continues without a display
            self._store = None
            logging.getLogger(__name__).warning("the progress of rollouts is no longer shown: %s", error)
        if self._show is not None:
            self._show(None)


class Pace:
    """Elapsed and remaining seconds of a run since its start, or since its resumption after `done` steps."""

    def __init__(self, total: int, done: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.done = total, done
        self._clock, self._first, self._start = clock, done, clock()
        self._began = self._last = self._start

    def mark(self, step: int) -> None:
        """Mark a step as done; step 0 is the validation before training, which does not count for the speed."""
        self.done, self._last = max(step, self.done), self._clock()
        if self.done == self._first:
            self._began = self._last

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    @property
    def remaining(self) -> float | None:
        """Seconds until the last step is done, at the mean speed so far; `None` before the first step."""
        steps = self.done - self._first
        if not steps:
            return None
        left = (self._last - self._began) / steps * (self.total - self.done)
        return max(0.0, left - (self._clock() - self._last))


LOGGER_NAME = "megatron_rl"


class _ConsoleHandler(logging.Handler):
    """Handler that prints to the current `sys.stdout`, which progress bars may replace later."""

    last = ""  # the line that was printed last

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.last = self.format(record)
            print(self.last, flush=True)
        except Exception:
            self.handleError(record)


class _FileHandler(logging.FileHandler):
    """Handler that drops lines the disk does not accept, with one warning, instead of ending the run."""

    is_failing = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.is_failing:
            self.is_failing = True
            print(f"warning: lines are missing in {self.baseFilename}: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def open_rank_log(run_dir: Path, rank: int) -> logging.Logger:
    """Return the package's logger, which appends to `logs/rank<N>.log` and on rank 0 prints INFO and above."""
    logger = logging.getLogger(LOGGER_NAME)
    close_rank_log(logger)
    path = log_path(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = _FileHandler(path, encoding="utf-8", errors="backslashreplace")
    to_file.setFormatter(logging.Formatter(f"%(asctime)s rank{rank} %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(to_file)
    if rank == 0:
        console = _ConsoleHandler(logging.INFO)
        console.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(console)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # else a library's handler on the root logger prints every line twice
    return logger


def last_line(logger: logging.Logger) -> str:
    """Return the line that a logger of `open_rank_log` printed last, "" without one."""
    return next((handler.last for handler in logger.handlers if isinstance(handler, _ConsoleHandler)), "")


def close_rank_log(logger: logging.Logger) -> None:
    """Close the files of `open_rank_log` and restore the logger."""
    for handler in list(logger.handlers):
        if isinstance(handler, _FileHandler | _ConsoleHandler):
            logger.removeHandler(handler)
            handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def show_error(text: str, log_file: Path) -> None:
    """Print a report and append it to this rank's log."""
    append_to_log(log_file, f"error: {text}")
    print(f"error: {text}", file=sys.stderr, flush=True)


def append_to_log(log_file: Path, text: str) -> None:
    """Append to a rank's log; a full disk is ignored, since it must not hide why the job ended."""
    with contextlib.suppress(OSError), open(log_file, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text.rstrip("\n") + "\n")


class PhaseTimers:
    """Wall time and memory by phase, with a monotonic clock in seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, int] = {}
        self._swallowing = 0
        self.memory_probe: Callable[[], int] | None = None  # returns bytes in use, at the end of each phase
        self.annotate: Callable[[str], AbstractContextManager[None]] | None = None  # a named range for profilers
        self.idle = "between phases"  # shown outside all phases
        self.step = self.num_entered = 0  # phases entered so far, in the same order on all ranks
        self.memory = 0  # last result of the probe, in bytes
        self.phases: list[str] = []  # current ones, the outermost first
        self.began: list[float] = []  # their starts, in seconds of the clock
        self.part: tuple[int, int] | None = None  # what is done of the innermost phase, and all of it, on this rank
        self.spans: Spans | None = None

    def attach(
        self, memory_probe: Callable[[], int], annotate: Callable[[str], AbstractContextManager[None]] | None
    ) -> None:
        """Set `memory_probe` (returns bytes in use) and `annotate` (opens a profiler's range), for every phase."""
        self.memory_probe, self.annotate = memory_probe, annotate

    def trace(self, spans: Spans) -> None:
        """Record every phase as a span."""
        self.spans = spans

    def begin_step(self, step: int, idle: str = "between phases") -> None:
        """Set the step of the phases that follow, and a text for the time outside of all phases."""
        self.step, self.idle = step, idle

    @contextmanager
    def phase(self, name: str, *, swallow: bool = False) -> Iterator[None]:
        """Count the seconds of the block under `name`; `swallow` suppresses inner phases."""
        start, is_counted = self._clock(), not self._swallowing
        self._swallowing += swallow
        self.num_entered += 1
        self.phases.append(name)
        self.began.append(start)
        span = self.spans and self.spans.begin(name, start, self.step)
        try:
            with self.annotate(name) if self.annotate else nullcontext():
                yield
        except BaseException as error:
            if span:
                span.fail(type(error).__name__)
            if not hasattr(error, "left_phase") and name != "step":
                vars(error)["left_phase"] = name  # for the report of the failure
            raise
        finally:
            self.part = None
            self.phases.pop()
            self.began.pop()
            self._swallowing -= swallow
            end = self._clock()
            if self.spans and span:
                self.spans.end(span, end)
            if is_counted:
                self._seconds[name] = self._seconds.get(name, 0.0) + end - start
                if self.memory_probe is not None:
                    self.memory = self.memory_probe()
                    self._bytes[name] = max(self._bytes.get(name, 0), self.memory)

    def current(self) -> tuple[str, float]:
        """Return the current phases and the seconds in the innermost one; may be called by another thread."""
        going = [item for item in zip(tuple(self.phases), tuple(self.began)) if item[0] != "step"]
        if not going:
            return self.idle, 0.0
        return ", ".join(name for name, _ in going), self._clock() - going[-1][1]

    def expect(self, whole: int) -> None:
        """Set the number of equal parts of the current phase on this rank, each of which calls `advance` at its end."""
        self.part = 0, whole

    def advance(self) -> None:
        """Count a part of the current phase as done."""
        if self.part is not None:
            self.part = self.part[0] + 1, self.part[1]

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
        if self.spans:
            self.spans.flush()
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
