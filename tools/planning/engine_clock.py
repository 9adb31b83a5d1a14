# SPDX-License-Identifier: Apache-2.0
"""The time of one rollout engine: which responses run, which wait for room, and when the next one is finished.

Per decoding pass every running response gets a token. A response joins between two passes when a slot and room for
its tokens in the KV cache are there; where the cache is full, the response that joined last gives way, and computes
its tokens again later. That is what vLLM does, without its limits on the tokens of one pass.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class StepCost:
    """Seconds of a decoding pass.

    Attributes:
        fixed: of every pass.
        per_request: for each response that runs.
        per_prompt_token: for each token that is computed when a response joins (prefill).
        per_context_token: for each token of prompts and responses that the pass reads from the KV cache.
    """

    fixed: float
    per_request: float
    per_prompt_token: float = 0.0
    per_context_token: float = 0.0

    def of_passes(self, passes: int, running: int, context: int) -> float:
        """Seconds of `passes` decoding passes that begin with this many responses and tokens in the cache."""
        read = passes * context + running * passes * (passes - 1) / 2
        return passes * (self.fixed + self.per_request * running) + self.per_context_token * read


@dataclass(frozen=True)
class EngineModel:
    """What an engine is.

    Attributes:
        cost: of its passes.
        max_num_seqs: responses that run at once.
        cache_tokens: that its KV cache holds.
    """

    cost: StepCost
    max_num_seqs: int
    cache_tokens: int


@dataclass(slots=True)
class Response:
    """One response on its way.

    Attributes:
        ordinal: of its prompt in the stream.
        length: tokens when it is finished.
        done: tokens so far, as of when it last left an engine.
        version: of the weights that made its first token; -1 before.
    """

    ordinal: int
    length: int
    done: int = 0
    version: int = -1

    def join(self, version: int) -> None:
        """It runs with the weights of this version."""
        self.version = version if self.version < 0 else self.version

    def leave(self, passes: int) -> None:
        """It ran for so many passes."""
        self.done += passes


class EngineClock:
    """An engine that only counts seconds.

    Args:
        model: what it is.
        prompt_tokens: of every prompt; computed once per version of the weights.

    Attributes:
        now: seconds, at the end of a pass.
        busy: of them, those in which something was computed.
        queue: responses that wait for room.
    """

    def __init__(self, model: EngineModel, prompt_tokens: int) -> None:
        self._model, self._prompt_tokens = model, prompt_tokens
        self.queue: deque[Response] = deque()
        self.now = self.busy = 0.0
        self._passes = self._context = self._joined = self._version = 0
        self._running: dict[int, tuple[Response, int]] = {}  # in the order in which they joined, with the pass of it
        self._ends: list[tuple[int, int]] = []  # pass in which a response ends, and its place in that order
        self._cached: set[int] = set()

    @property
    def is_running(self) -> bool:
        """A pass has something to do."""
        return bool(self._running)

    @property
    def num_unfinished(self) -> int:
        """Responses that run or wait."""
        return len(self._running) + len(self.queue)

    def begin(self, now: float, version: int) -> None:
        """New weights are there: what was computed of prompts is computed again; what runs keeps its tokens."""
        self.now, self._version = now, version
        self._cached.clear()

    def fill(self) -> None:
        """Let what waits join, in order, until there is no room."""
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
        """When the next response is finished, or the cache is full, if nothing joins before."""
        return self.now + self._seconds(self._passes_to_event()) if self._running else math.inf

    def _passes_to_event(self) -> int:
        while self._ends[0][1] not in self._running:  # gave way, or was interrupted
            heapq.heappop(self._ends)
        to_end = self._ends[0][0] - self._passes
        count = len(self._running)
        return to_end if count == 1 else min(to_end, max(1, (self._model.cache_tokens - self._context) // count))

    def _seconds(self, passes: int) -> float:
        return self._model.cost.of_passes(passes, len(self._running), self._context)

    def run_to_event(self) -> list[Response]:
        """Run up to the next event, and let what waits join; returns what is finished."""
        return self._run(self._passes_to_event())

    def run_past(self, time: float) -> list[Response]:
        """Finish the pass that runs at a time before the next event; returns what is finished with it."""
        if self._running and self.now < time:
            return self._run(self._count_passes(time - self.now))
        return []

    def _count_passes(self, seconds: float) -> int:
        """The fewest passes that take so long, at most those to the next event."""
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
        """Tokens of responses that are not finished, prompts not counted."""
        held = sum(response.done + self._passes - joined for response, joined in self._running.values())
        return held + sum(response.done for response in self.queue)

    def interrupt(self) -> None:
        """Forget keys and values: what runs waits, in the order of the stream, and is computed again."""
        stopped = [self._leave(place) for place in list(self._running)]
        self.queue = deque(sorted([*stopped, *self.queue], key=lambda response: response.ordinal))
        self._ends.clear()
