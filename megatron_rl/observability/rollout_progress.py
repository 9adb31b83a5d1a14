# SPDX-License-Identifier: Apache-2.0
"""Counts of the responses and tokens of all engines during a generation.

The engine's thread increments two numbers; twice a second another thread adds the increments to counters in the job's
store and passes their sums to the display on rank 0.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

_INTERVAL = 0.5  # seconds between two updates
_WINDOW = 20  # updates that the speed is averaged over


@dataclass(frozen=True)
class RolloutCount:
    """Progress of a generation over all engines.

    Attributes:
        tokens: sampled tokens, including unfinished responses.
        tokens_per_second: mean of the last ten seconds.
    """

    finished: int
    total: int
    tokens: int
    tokens_per_second: float
    seconds: float


Show = Callable[[RolloutCount | None], None]


class RolloutProgress:
    """Counter of the responses of generations; every rank makes the same calls.

    Args:
        store: shared by all ranks; `None` disables counting.
        show: on the displaying rank; called by another thread with the progress, and with `None` at the end.
    """

    def __init__(self, store: Store | None = None, show: Show | None = None) -> None:
        self._store, self._show = store, show
        self._generation = self._finished = self._tokens = 0
        self._added = (0, 0)

    def count(self, num_tokens: int) -> None:
        """Count a finished response of this rank's engine."""
        self._finished += 1
        self._tokens += num_tokens

    @contextmanager
    def follow(self, total: int, tokens_in_flight: Callable[[], int] | None) -> Iterator[None]:
        """Follow the generation in the block.

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
                finished, tokens = self._add_up(store, tokens_in_flight)
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

    def _add_up(self, store: Store, tokens_in_flight: Callable[[], int]) -> tuple[int, int]:
        """Add this engine's increments to the sums over all engines; return the sums of responses and tokens."""
        finished, tokens = (
            self._finished,
            self._tokens,
        )  # read first, else a response could count twice
        mine = finished, tokens + tokens_in_flight()
        sums = [
            store.add(f"{self._generation}/{name}", now - before)
            for name, now, before in zip(("finished", "tokens"), mine, self._added, strict=True)
        ]
        self._added = mine
        return sums[0], sums[1]
