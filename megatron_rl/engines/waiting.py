# SPDX-License-Identifier: Apache-2.0
"""The requests of an engine whose step is a whole batch: they wait, and nothing runs between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from megatron_rl.engines.protocol import Request, Sampled


class WaitingRequests:
    """Three of the methods of a `RolloutEngine`, and the batches for its `step`."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []

    def add(self, requests: Sequence[Request]) -> None:
        """They wait for a step."""
        self._waiting += requests

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Forget requests; none of them has a token."""
        asked, waiting = set(keys), self._waiting
        self._waiting = [request for request in waiting if request.key not in asked]
        return [
            Sampled(request.key, np.empty(0, np.int32), np.empty(0, np.float32), "interrupted")
            for request in waiting
            if request.key in asked
        ]

    def has_requests(self) -> bool:
        """True if something waits."""
        return bool(self._waiting)

    def take_batch(self, size: int | None = None) -> list[Request]:
        """The first that wait and are drawn alike, at most `size` of them; they wait no longer."""
        first = self._waiting[:size]
        batch = list(takewhile(lambda request: request.sampling == first[0].sampling, first))
        del self._waiting[: len(batch)]
        return batch
