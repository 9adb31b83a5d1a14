# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: lengths are given, tokens follow from seeds, and a step costs what a formula says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.planning.engine_clock import StepCost

VOCAB_SIZE = 1000


class ScriptedEngine:
    """Samples one token of each running request per step.

    Args:
        lengths: by key of a request, tokens of its response.
        slots: requests that run at once; the others wait in the order in which they were added.
        cost: of a step.
        spend: is told the seconds of each step, `time.sleep` for one; None: only `seconds` counts them.

    Attributes:
        seconds: spent in steps.
    """

    def __init__(
        self, lengths: Mapping[int, int], slots: int, cost: StepCost, spend: Callable[[float], None] | None = None
    ) -> None:
        self._lengths, self._slots, self._cost, self._spend = lengths, slots, cost, spend
        self._waiting: list[Request] = []
        self._running: dict[int, tuple[Request, int]] = {}  # by key, with the number of tokens so far
        self._cached: set[bytes] = set()
        self.seconds = 0.0

    def add(self, requests: Sequence[Request]) -> None:
        """They run when a slot is free."""
        self._waiting += requests

    def step(self) -> list[Sampled]:
        """A token for everything that runs."""
        seconds = 0.0
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting.pop(0)
            self._running[request.key] = request, 0
            seconds += self._cost.per_prompt_token * self._count_uncached(request.tokens)
        context = sum(len(request.tokens) + done for request, done in self._running.values())
        seconds += self._cost.of_passes(1, len(self._running), context)
        self.seconds += seconds
        if self._spend is not None:
            self._spend(seconds)
        finished = []
        for key, (request, done) in list(self._running.items()):
            self._running[key] = request, done + 1
            limit = request.sampling.max_tokens
            if done + 1 >= min(self._lengths[key], limit):
                finished.append(self._end(key, "length" if self._lengths[key] > limit else "stop"))
        return finished

    def _count_uncached(self, tokens: np.ndarray) -> int:
        """Tokens of a prompt that the prefix cache does not have: none of one that came before."""
        known = len(self._cached)
        self._cached.add(tokens.tobytes())
        return len(tokens) * (len(self._cached) - known)

    def _end(self, key: int, reason: str) -> Sampled:
        request, done = self._running.pop(key)
        rng = np.random.default_rng(request.seed)
        tokens = rng.integers(0, VOCAB_SIZE, self._lengths[key], dtype=np.int32)
        return Sampled(key, tokens[:done], -rng.random(self._lengths[key], dtype=np.float32)[:done], reason)

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """What runs with its tokens so far, what waits with none."""
        waiting = [request for request in self._waiting if request.key in set(keys)]
        self._waiting = [request for request in self._waiting if request.key not in set(keys)]
        self._running |= {request.key: (request, 0) for request in waiting}
        return [self._end(key, "interrupted") for key in keys if key in self._running]

    def has_requests(self) -> bool:
        """True if something runs or waits."""
        return bool(self._waiting or self._running)

    def tokens_in_flight(self) -> int:
        """Tokens of what runs."""
        return sum(done for _, done in list(self._running.values()))

    def close(self) -> None:
        """Nothing to release."""
