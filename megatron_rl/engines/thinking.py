# SPDX-License-Identifier: Apache-2.0
"""Thinking budgets for every engine: an overlong thought is closed, and the response continues.

A response has two parts, the first of at most `thinking_budget` tokens. If the first ends inside a thought, closing
tokens are inserted, which the loss excludes. Decisions depend on tokens only, so an engine's ranks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.engines.protocol import Request, RolloutEngine, Sampled
from megatron_rl.engines.sampling import Thoughts, derive_seed
from megatron_rl.types import KeptSets, complete_routes


class ThinkingBudget:
    """A `RolloutEngine` that wraps another and enforces `SamplingConfig.thinking_budget`."""

    def __init__(self, engine: RolloutEngine, thoughts: Thoughts) -> None:
        self._engine, self._thoughts = engine, thoughts
        self.has_requests, self.close = engine.has_requests, engine.close
        self._thinking: dict[int, Request] = {}  # original requests whose first part runs
        self._begun: dict[int, Sampled] = {}  # first parts of responses whose second part runs

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests, limited to their thinking budgets."""
        self._engine.add([self._limit(request) for request in requests])

    def step(self) -> list[Sampled]:
        """Advance the engine; return finished responses."""
        finished, continued = [], []
        for sampled in self._engine.step():
            request = self._thinking.pop(sampled.key, None)
            if request is None:
                finished.append(self._complete(sampled))
            elif sampled.finish_reason == "length":
                continued.append(self._continue(request, sampled))
            else:
                finished.append(sampled)
        if continued:
            self._engine.add(continued)
        return finished

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Remove requests; return partial responses."""
        for key in keys:
            self._thinking.pop(key, None)
        return [self._complete(sampled) for sampled in self._engine.interrupt(keys)]

    def tokens_in_flight(self) -> int:
        """Count the tokens of unfinished responses, both within the thinking budget and after it."""
        return self._engine.tokens_in_flight() + sum(len(begun.tokens) for begun in [*self._begun.values()])

    def _limit(self, request: Request) -> Request:
        """Limit a request to its remaining thinking budget.

        Return it unchanged if the budget is spent or the closing tokens would not fit.
        """
        budget, most = request.sampling.thinking_budget, request.sampling.max_tokens
        left = most if budget is None else budget - request.num_sampled
        if left < 1 or left + len(self._thoughts.closing) >= most:
            return request
        self._thinking[request.key] = request
        return replace(request, sampling=replace(request.sampling, max_tokens=left))

    def _continue(self, request: Request, sampled: Sampled) -> Request:
        if self._thoughts.are_open([*request.tokens.tolist(), *np.asarray(sampled.tokens).tolist()]):
            closing, logprobs = self._thoughts.closing, np.zeros(len(self._thoughts.closing), np.float32)
            inserted = np.ones(len(closing), bool)
            sampled = join(sampled, Sampled(sampled.key, closing, logprobs, sampled.finish_reason, inserted=inserted))
        self._begun[request.key] = sampled
        seed = derive_seed(request.seed, 0, 0, 0, position=len(sampled.tokens))
        return request.continued(np.asarray(sampled.tokens, np.int32), seed)

    def _complete(self, sampled: Sampled) -> Sampled:
        begun = self._begun.pop(sampled.key, None)
        return sampled if begun is None else join(begun, sampled)


def join(first: Sampled, later: Sampled) -> Sampled:
    """Join a response and its continuation."""
    marks = [np.zeros(len(part.tokens), bool) if part.inserted is None else part.inserted for part in (first, later)]
    has_inserted = first.inserted is not None or later.inserted is not None
    return replace(
        later,
        tokens=np.concatenate([np.asarray(first.tokens, np.int32), np.asarray(later.tokens, np.int32)]),
        logprobs=np.concatenate([np.asarray(part.logprobs, np.float32) for part in (first, later)]),
        kept=KeptSets.join_known([(part.kept, len(part.tokens)) for part in (first, later)]),
        num_cached=first.num_cached,
        routes=complete_routes(first.routes, later.routes),
        inserted=np.concatenate(marks) if has_inserted else None,
    )
