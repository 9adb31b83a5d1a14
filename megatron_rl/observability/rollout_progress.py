# SPDX-License-Identifier: Apache-2.0
"""How many responses and tokens all engines have generated so far, while they generate.

The thread that runs an engine only adds to two numbers. Another one adds what is new to counters in the job's store,
twice a second, and tells the sums over all engines to the display on rank 0.
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

_INTERVAL = 0.5  # seconds between two looks
_WINDOW = 20  # looks over which the speed is taken


@dataclass(frozen=True)
class RolloutCount:
    """How far a generation is, all engines together.

    Attributes:
        finished, total: responses.
        tokens: sampled so far, including unfinished responses.
        tokens_per_second: over the last ten seconds.
        seconds: since it began.
    """

    finished: int
    total: int
    tokens: int
    tokens_per_second: float
    seconds: float


Show = Callable[[RolloutCount | None], None]


class RolloutProgress:
    """Counts the responses of generations; the same calls on every rank.

    Args:
        store: shared by all ranks; None: nothing is counted.
        show: on the rank that shows: told twice a second how far a generation is, and None when it is over; called
            by another thread.
    """

    def __init__(self, store: Store | None = None, show: Show | None = None) -> None:
        self._store, self._show = store, show
        self._generation = self._finished = self._tokens = 0
        self._added = (0, 0)

    def count(self, num_tokens: int) -> None:
        """A response of this rank's engine is there."""
        self._finished += 1
        self._tokens += num_tokens

    @contextmanager
    def follow(self, total: int, tokens_in_flight: Callable[[], int] | None) -> Iterator[None]:
        """A generation continues in the block.

        Args:
            total: responses of all engines.
            tokens_in_flight: tokens of unfinished responses of this rank's engine, asked by another thread; None: this
                rank does not speak for an engine.
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
                is_over = over.wait(_INTERVAL)  # look once more at the end: other ranks want the last ones too
                finished, tokens = self._add_up(store, tokens_in_flight)
                now = time.monotonic()
                speed = (tokens - looks[0][1]) / (now - looks[0][0])
                looks.append((now, tokens))
                if self._show is not None:
                    self._show(RolloutCount(finished, total, tokens, max(0.0, speed), now - start))
        except Exception as error:  # the store is gone; a run continues without being watched
            self._store = None
            logging.getLogger(__name__).warning("the progress of rollouts is no longer shown: %s", error)
        if self._show is not None:
            self._show(None)

    def _add_up(self, store: Store, tokens_in_flight: Callable[[], int]) -> tuple[int, int]:
        """Add what is new here to the sums over all engines, and return them: responses, tokens."""
        finished, tokens = self._finished, self._tokens  # read first: what finishes meanwhile must not count twice
        mine = finished, tokens + tokens_in_flight()
        sums = [
            store.add(f"{self._generation}/{name}", now - before)
            for name, now, before in zip(("finished", "tokens"), mine, self._added, strict=True)
        ]
        self._added = mine
        return sums[0], sums[1]
