# SPDX-License-Identifier: Apache-2.0
"""The request queue of engines whose step generates whole responses to a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from megatron_rl.engines.protocol import Request, Sampled


class WaitingRequests:
    """A queue with the request methods of a `RolloutEngine` except `step`."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._waiting += requests

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Remove requests and return empty responses for them."""
        asked, waiting = set(keys), self._waiting
        self._waiting = [request for request in waiting if request.key not in asked]
        return [
            Sampled(request.key, np.empty(0, np.int32), np.empty(0, np.float32), "interrupted")
            for request in waiting
            if request.key in asked
        ]

    def has_requests(self) -> bool:
        """Return whether a request waits."""
        return bool(self._waiting)

    def take_batch(self, size: int | None = None) -> list[Request]:
        """Dequeue the leading requests that have equal sampling settings, at most `size`."""
        first = self._waiting[:size]
        batch = list(takewhile(lambda request: request.sampling == first[0].sampling, first))
        del self._waiting[: len(batch)]
        return batch
