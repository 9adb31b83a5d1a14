# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: given lengths, seeded tokens, and step costs by a formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from megatron_rl.engines.protocol import Request, Sampled
from tools.planning.engine_clock import StepCost

VOCAB_SIZE = 1000


class ScriptedEngine:
    """Samples one token per running request and step.

    Args:
        lengths: response tokens by request key.
        slots: limit of running requests.
        spend: called with a step's seconds, such as `time.sleep`.
        prompt_tokens: per prompt; a request's further tokens were sampled earlier. If `None`, all are prompt.
    """

    def __init__(
        self,
        lengths: Mapping[int, int],
        slots: int,
        cost: StepCost,
        spend: Callable[[float], None] | None = None,
        prompt_tokens: int | None = None,
    ) -> None:
        self._lengths, self._slots, self._cost, self._spend = lengths, slots, cost, spend
        self._prompt_tokens = prompt_tokens
        self._waiting: list[Request] = []
        self._running: dict[int, tuple[Request, int]] = {}  # by key, with tokens sampled so far
        self._cached: set[bytes] = set()
        self.seconds = 0.0

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._waiting += requests

    def step(self) -> list[Sampled]:
        """Sample a token for each running request; return finished ones."""
        seconds = 0.0
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting.pop(0)
            self._running[request.key] = request, 0
            seconds += self._cost.per_prompt_token * self._count_uncached(request)
        context = sum(len(request.tokens) + done for request, done in self._running.values())
        seconds += self._cost.of_passes(1, len(self._running), context)
        self.seconds += seconds
        if self._spend is not None:
            self._spend(seconds)
        finished = []
        for key, (request, done) in list(self._running.items()):
            self._running[key] = request, done + 1
            left, limit = self._lengths[key] - self._count_sampled(request), request.sampling.max_tokens
            if done + 1 >= min(left, limit):
                finished.append(self._end(key, "length" if left > limit else "stop"))
        return finished

    def _count_sampled(self, request: Request) -> int:
        """Count response tokens sampled before the request."""
        return 0 if self._prompt_tokens is None else len(request.tokens) - self._prompt_tokens

    def _count_uncached(self, request: Request) -> int:
        """Count tokens outside the prefix cache: earlier response tokens, and a new prompt."""
        known, sampled = len(self._cached), self._count_sampled(request)
        prompt = request.tokens[: len(request.tokens) - sampled]
        self._cached.add(prompt.tobytes())
        return sampled + len(prompt) * (len(self._cached) - known)

    def drop_cache(self) -> None:
        """Drop prefixes computed with older weights."""
        self._cached.clear()

    def _end(self, key: int, reason: str) -> Sampled:
        request, done = self._running.pop(key)
        rng = np.random.default_rng(request.seed)
        tokens = rng.integers(0, VOCAB_SIZE, self._lengths[key], dtype=np.int32)
        return Sampled(key, tokens[:done], -rng.random(self._lengths[key], dtype=np.float32)[:done], reason)

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Return requests with their tokens so far."""
        waiting = [request for request in self._waiting if request.key in set(keys)]
        self._waiting = [request for request in self._waiting if request.key not in set(keys)]
        self._running |= {request.key: (request, 0) for request in waiting}
        return [self._end(key, "interrupted") for key in keys if key in self._running]

    def has_requests(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._waiting or self._running)

    def tokens_in_flight(self) -> int:
        """Count tokens of running requests."""
        return sum(done for _, done in list(self._running.values()))

    def close(self) -> None:
        """Do nothing."""
