# SPDX-License-Identifier: Apache-2.0
"""Seconds per phase of a step.

Phases accumulate until `pop`, so a phase that is entered several times in a step is reported once.
A phase that raises is still counted. Nested phases are counted on their own: the outer one includes
the inner one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimers:
    """Accumulates wall time by phase.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds spent in the block under `name`."""
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def pop(self) -> dict[str, float]:
        """Seconds by `time/<name>` since the last call; starts again at zero."""
        seconds = {f"time/{name}": value for name, value in self._seconds.items()}
        self._seconds.clear()
        return seconds
