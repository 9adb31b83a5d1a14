# SPDX-License-Identifier: Apache-2.0
"""Simulated time of one rollout engine: which responses run, wait, and finish next.

A decoding pass adds a token to every running response. A response joins between passes if a slot and KV cache are free;
if the cache is full, the last one to join is preempted and later recomputed. This is vLLM's policy without its limit on
tokens per pass.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class StepCost:
    """Seconds of a decoding pass: fixed, per running response, per prefilled token, per KV cache token read.

    Attributes:
        host_fixed, host_per_request: of the host, which prepares a pass during the one before; the longer one counts.
    """

    fixed: float
    per_request: float
    per_prompt_token: float = 0.0
    per_context_token: float = 0.0
    host_fixed: float = 0.0
    host_per_request: float = 0.0

    def of_passes(self, passes: int, running: int, context: int) -> float:
        """Return the seconds of passes from these numbers of responses and cached tokens."""
        read = passes * context + running * passes * (passes - 1) / 2
        device = passes * (self.fixed + self.per_request * running) + self.per_context_token * read
        return max(device, passes * (self.host_fixed + self.host_per_request * running))


@dataclass(frozen=True)
class EngineModel:
    """Cost, maximum running responses, and KV cache capacity in tokens of an engine."""

    cost: StepCost
    max_num_seqs: int
    cache_tokens: int


@dataclass(slots=True)
class Response:
    """A response in progress.

    Attributes:
        ordinal: index of its prompt in the stream.
        length: final tokens.
        done: tokens when it last left an engine.
        version: policy version of its first token; -1 before it.
    """

    ordinal: int
    length: int
    done: int = 0
    version: int = -1

    def join(self, version: int) -> None:
        """Set the policy version of the first token to `version`, unless it is set."""
        self.version = version if self.version < 0 else self.version

    def leave(self, passes: int) -> None:
        """Add the tokens of the decoding passes since the response joined its engine."""
        self.done += passes


class EngineClock:
    """An engine that only counts seconds.

    Args:
        prompt_tokens: prefilled once per policy version.

    Attributes:
        now: end of the last pass, seconds.
        busy: seconds of computation.
    """

    def __init__(self, model: EngineModel, prompt_tokens: int) -> None:
        self._model, self._prompt_tokens = model, prompt_tokens
        self.queue: deque[Response] = deque()
        self.now = self.busy = 0.0
        self._passes = self._context = self._joined = self._version = 0
        self._running: dict[int, tuple[Response, int]] = {}  # in order of joining, with the pass at joining
        self._ends: list[tuple[int, int]] = []  # pass in which a response ends, key in `_running`
        self._cached: set[int] = set()

    @property
    def is_running(self) -> bool:
        """Whether a response runs."""
        return bool(self._running)

    @property
    def num_unfinished(self) -> int:
        """Count running and waiting responses."""
        return len(self._running) + len(self.queue)

    def begin(self, now: float, version: int) -> None:
        """Start a policy version; prompts must be prefilled again."""
        self.now, self._version = now, version
        self._cached.clear()

    def fill(self) -> None:
        """Admit responses in order while they fit."""
        while self.queue:
            tokens, count = self._prompt_tokens + self.queue[0].done, len(self._running)
            fits = count < self._model.max_num_seqs and self._context + tokens + count + 1 <= self._model.cache_tokens
            if count and not fits:
                return
            self._join(self.queue.popleft(), tokens)

    def _join(self, response: Response, tokens: int) -> None:
        response.join(self._version)
        computed = response.done + self._prompt_tokens * (response.ordinal not in self._cached)
        self._cached.add(response.ordinal)
        self._spend(computed * self._model.cost.per_prompt_token)
        self._running[self._joined] = response, self._passes
        heapq.heappush(self._ends, (self._passes + response.length - response.done, self._joined))
        self._joined += 1
        self._context += tokens

    def _spend(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds

    def next_event(self) -> float:
        """Return when a response finishes or the cache is full."""
        return self.now + self._seconds(self._passes_to_event()) if self._running else math.inf

    def _passes_to_event(self) -> int:
        while self._ends[0][1] not in self._running:  # preempted or interrupted
            heapq.heappop(self._ends)
        to_end = self._ends[0][0] - self._passes
        count = len(self._running)
        return to_end if count == 1 else min(to_end, max(1, (self._model.cache_tokens - self._context) // count))

    def _seconds(self, passes: int) -> float:
        return self._model.cost.of_passes(passes, len(self._running), self._context)

    def run_to_event(self) -> list[Response]:
        """Run to the next event; return finished responses."""
        return self._run(self._passes_to_event())

    def run_past(self, time: float) -> list[Response]:
        """Finish the pass that runs at `time`; return finished responses."""
        if self._running and self.now < time:
            return self._run(self._count_passes(time - self.now))
        return []

    def _count_passes(self, seconds: float) -> int:
        """Return the fewest passes that take `seconds`, limited by the next event."""
        low, high = 1, self._passes_to_event()
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._seconds(middle) >= seconds else (middle + 1, high)
        return low

    def _run(self, passes: int) -> list[Response]:
        self._spend(self._seconds(passes))
        self._passes += passes
        self._context += passes * len(self._running)
        finished = []
        while self._ends and self._ends[0][0] <= self._passes:
            _, place = heapq.heappop(self._ends)
            if place in self._running:
                finished.append(self._leave(place))
        while len(self._running) > 1 and self._context + len(self._running) > self._model.cache_tokens:
            self.queue.appendleft(self._leave(next(reversed(self._running))))
        self.fill()
        return finished

    def _leave(self, place: int) -> Response:
        response, joined = self._running.pop(place)
        response.leave(self._passes - joined)
        self._context -= self._prompt_tokens + response.done
        return response

    def count_tokens(self) -> int:
        """Count tokens of unfinished responses, without prompts."""
        held = sum(response.done + self._passes - joined for response, joined in self._running.values())
        return held + sum(response.done for response in self.queue)

    def interrupt(self) -> None:
        """Drop the KV cache and requeue running responses in stream order."""
        stopped = [self._leave(place) for place in list(self._running)]
        self.queue = deque(sorted([*stopped, *self.queue], key=lambda response: response.ordinal))
        self._ends.clear()
