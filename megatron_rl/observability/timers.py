# SPDX-License-Identifier: Apache-2.0
"""Seconds, and memory, per phase of a step.

Phases accumulate until `pop`, so a phase that is entered several times in a step is reported once. A
phase that raises is still counted. Nested phases are counted on their own (the outer one includes the
inner one), unless the outer one swallows them: validation generates and scores too, and that is not
the step's own rollout or reward time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


class PhaseTimers:
    """Accumulates wall time by phase.

    Args:
        clock: monotonic clock in seconds.

    Attributes:
        memory_probe: bytes in use now; asked at the end of each phase, or None.
        memory: what it said last; 0 before.
        annotate: makes a named range of each phase, for profilers; or None.
        step: of the main loop, for those who watch from outside.
        phases: that are going on, the outermost first.
        began: when each of them began, by the clock.
        num_entered: phases entered so far; ranks of one program enter the same ones in the same order.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, int] = {}
        self._swallowing = 0
        self.memory_probe: Callable[[], int] | None = None
        self.annotate: Callable[[str], AbstractContextManager[None]] | None = None
        self.step = self.num_entered = self.memory = 0
        self.phases: list[str] = []
        self.began: list[float] = []

    def attach(
        self, memory_probe: Callable[[], int], annotate: Callable[[str], AbstractContextManager[None]] | None
    ) -> None:
        """From now on ask for memory, and make a range of each phase (or none)."""
        self.memory_probe, self.annotate = memory_probe, annotate

    def begin_step(self, step: int) -> None:
        """Say which step of the main loop the phases that follow belong to."""
        self.step = step

    @contextmanager
    def phase(self, name: str, *, swallow: bool = False) -> Iterator[None]:
        """Count the seconds spent in the block under `name`.

        Args:
            name: of the phase.
            swallow: phases inside the block are not counted on their own.
        """
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
                vars(error)["left_phase"] = name  # told by a report of the failure
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
        """What happens now inside the step, and for how many seconds; may be asked by another thread."""
        going = [item for item in zip(tuple(self.phases), tuple(self.began)) if item[0] != "step"]
        if not going:
            return "between phases", 0.0
        return ", ".join(name for name, _ in going), self._clock() - going[-1][1]

    def watch(self, role: Any, **phases: str) -> Any:
        """A stand-in for `role` whose methods are counted: `watch(actor, update="update")`.

        Every other attribute is the role's own.
        """
        return _Watched(role, self, phases)

    def seen(self) -> dict[str, float]:
        """Seconds by `time/<name>` and bytes by `memory/<name>` since the last `pop`."""
        record: dict[str, float] = {f"time/{name}": value for name, value in self._seconds.items()}
        return record | {f"memory/{name}": value for name, value in self._bytes.items()}

    def complete(self, seen: Mapping[str, float]) -> None:
        """Take over from another rank what took longer or more there: a role that is not here works there."""
        for name, value in seen.items():
            kind, _, phase = name.partition("/")
            if kind == "time":
                self._seconds[phase] = max(self._seconds.get(phase, 0.0), value)
            else:
                self._bytes[phase] = max(self._bytes.get(phase, 0), int(value))

    def pop(self) -> dict[str, float]:
        """What was `seen`; starts again at zero."""
        record = self.seen()
        self._seconds.clear()
        self._bytes.clear()
        return record


class _Watched:
    __slots__ = ("_phases", "_role", "_timers")  # setting another attribute is an error: it would not reach the role

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
