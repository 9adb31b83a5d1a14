# SPDX-License-Identifier: Apache-2.0
"""How far a run is, and when it will be done."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Seconds that a run has taken since it was started (or resumed), and those it will still take.

    Args:
        total: steps of the run.
        done: steps that were done before.
        clock: monotonic clock in seconds.
    """

    def __init__(self, total: int, done: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.done = total, done
        self._clock, self._first, self._start = clock, done, clock()
        self._began = self._last = self._start

    def mark(self, step: int) -> None:
        """A step is done (0: the validation before training, which tells nothing of the speed)."""
        self.done, self._last = max(step, self.done), self._clock()
        if self.done == self._first:
            self._began = self._last

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    @property
    def remaining(self) -> float | None:
        """Seconds until the last step is done, at the mean speed so far; None before the first step."""
        steps = self.done - self._first
        if not steps:
            return None
        left = (self._last - self._began) / steps * (self.total - self.done)
        return max(0.0, left - (self._clock() - self._last))
