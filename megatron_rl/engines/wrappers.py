# SPDX-License-Identifier: Apache-2.0
"""Parts of engines: queues, continuous batches, thinking budgets, and stand-ins on other ranks.

With a thinking budget, a response has two parts, the first of at most `thinking_budget` tokens. If the first ends
inside a thought, closing tokens are inserted, which the loss excludes. Decisions depend on tokens only, so an engine's
ranks agree.

A continuous batch schedules responses over a paged KV cache, without a model. A slot holds a token's keys and values in
every layer; `block_size` slots are a block. A response owns blocks for its maximum length. A forward computes new
prompts and the newest token of running responses as segments of one row: n new tokens that attend to k >= n slots.
Requests start in order of arrival, if fewer than `max_num_seqs` run and their blocks are free. Hence no preemption, no
chunked prefill, no prefix cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat, takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_rl.engines.protocol import ClosedBatches, EngineWeights, Request, RolloutEngine, Sampled, derive_seed
from megatron_rl.types import KeptSets, RouteShape, UserError, complete_routes
from megatron_rl.weights.placement_tables import PlacementTable, as_table

if TYPE_CHECKING:
    from megatron_rl.engines.endings import StopStrings, Thoughts
    from megatron_rl.weights.shard_box import ShardBox


class WaitingRequests:
    """A queue with the request methods of a `RolloutEngine` except `step`."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._waiting += requests

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Remove requests and return empty responses for them."""
        asked, nothing = set(keys), (np.empty(0, np.int32), np.empty(0, np.float32))
        removed = [request for request in self._waiting if request.key in asked]
        self._waiting = [request for request in self._waiting if request.key not in asked]
        return [Sampled(request.key, *nothing, "interrupted") for request in removed]

    def has_requests(self) -> bool:
        """Return whether a request waits."""
        return bool(self._waiting)

    def tokens_in_flight(self) -> int:
        """Return 0: nothing runs between two steps."""
        return 0

    def take_batch(self, size: int | None = None) -> list[Request]:
        """Dequeue the leading requests that have equal sampling settings, at most `size`."""
        first = self._waiting[:size]
        batch = list(takewhile(lambda request: request.sampling == first[0].sampling, first))
        del self._waiting[: len(batch)]
        return batch


class OneTurn(WaitingRequests):
    """A `RolloutEngine` over an engine that only has `generate`: each step answers one batch of waiting requests."""

    def __init__(self, engine: ClosedBatches) -> None:
        super().__init__()
        self._engine = engine
        self.tokens_in_flight, self.close = engine.tokens_in_flight, engine.close

    def step(self) -> list[Sampled]:
        """Generate the responses to a batch of waiting requests; surplus ones repeat the last key, which is refused."""
        batch = self.take_batch()
        if not batch:
            return []
        responses = self._engine.generate([r.tokens for r in batch], [r.seed for r in batch], batch[0].sampling)
        keys = chain((r.key for r in batch), repeat(batch[-1].key))
        return [replace(response, key=key) for key, response in zip(keys, responses, strict=False)]


class AbsentEngine(WaitingRequests, EngineWeights):
    """A stand-in on ranks without an engine; `keys`: engine rank -> `shard_key`, `tables`: key -> its boxes."""

    def __init__(self, keys: Mapping[int, Hashable], tables: Mapping[Hashable, Iterable[ShardBox]]) -> None:
        super().__init__()
        self._keys, self._tables = keys, {key: as_table(boxes) for key, boxes in tables.items()}
        self.params: Mapping[str, torch.Tensor] = {}

    def shard_key(self, rank: int) -> Hashable:
        """Return the identifier of an engine rank's placement table."""
        return self._keys[rank]

    def placements(self, rank: int) -> PlacementTable:
        """Return the placement table (the boxes of HF tensors) of an engine rank."""
        return self._tables[self._keys[rank]]

    def step(self) -> list[Sampled]:
        """Return no responses."""
        return []

    def close(self) -> None:
        """Do nothing."""


class ThinkingBudget:
    """A `RolloutEngine` that wraps another and enforces `SamplingConfig.thinking_budget`."""

    def __init__(self, engine: RolloutEngine, thoughts: Thoughts) -> None:
        self._engine, self._thoughts = engine, thoughts
        self.has_requests, self.close = engine.has_requests, engine.close
        self.load = getattr(engine, "load", None)
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
        """Limit a request to its thinking budget, unless it is spent or the closing tokens would not fit."""
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


@dataclass(eq=False)
class Running:
    """A response that is being sampled."""

    request: Request
    slots: np.ndarray  # [capacity] int64, KV-cache slots of its tokens in order
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[KeptSets] = field(default_factory=list)  # set that each token was drawn from, if sampling is truncated
    routes: list[np.ndarray] = field(default_factory=list)  # experts of its tokens, in parts [s, layers, choices]

    def finish(self, reason: str) -> Sampled:
        """Build the engine's response; `reason` is its finish reason."""
        routes = None
        if self.routes:  # unknown for the last token, which is never fed to the model
            routes = np.concatenate([*self.routes, RouteShape.of(self.routes[0]).unknown(1)])
        return Sampled(
            self.request.key,
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            reason,
            KeptSets.join(self.kept) if self.kept else None,
            routes=routes,
        )


@dataclass(frozen=True)
class PagedRows:
    """The t rows (tokens) of one forward: a segment per running response, and possibly a segment of padding."""

    running: Sequence[Running]  # responses that get a token
    tokens: np.ndarray  # [t] int64
    positions: np.ndarray  # [t] int64
    slots: np.ndarray  # [t] int64, KV-cache slots to write
    bounds: np.ndarray  # [num_segments + 1] int32, first row of each segment, and t
    key_slots: np.ndarray  # [k] int64, slots to attend to, segment by segment
    key_bounds: np.ndarray  # [num_segments + 1] int32, bounds of segments in `key_slots`

    @property
    def last(self) -> np.ndarray:
        """Indices of the rows that predict the next tokens, [responses] int64."""
        return self.bounds[1 : len(self.running) + 1].astype(np.int64) - 1


class ContinuousBatch(WaitingRequests):
    """The waiting and running requests of an engine, equal on all its ranks.

    Args:
        max_tokens: maximum rows of a forward; a longer prompt runs alone.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_tokens: int, stop: StopStrings | None = None
    ) -> None:
        super().__init__()
        self._free, self._block_size = list(range(num_blocks)), block_size
        self._num_blocks, self._max_num_seqs, self._max_tokens = num_blocks, max_num_seqs, max_tokens
        self._stop = stop
        self._running: list[Running] = []

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, unless one exceeds the empty cache (UserError)."""
        for request in requests:
            if self._count_blocks(request) > self._num_blocks:
                raise UserError(
                    f"a request of {len(request.tokens)} tokens that may get {request.sampling.max_tokens} more",
                    source="rollout.kv_cache_gib",
                    expected=f"at most {self._num_blocks * self._block_size} tokens, the room of the KV cache",
                    hint="make the cache larger, or data.max_prompt_length and data.max_response_length shorter",
                )
        super().add(requests)

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Remove requests, free their blocks, return partial responses."""
        asked = set(keys)
        ended = [one for one in self._running if one.request.key in asked]
        for one in ended:
            self._end(one)
        return [one.finish("interrupted") for one in ended] + super().interrupt(keys)

    def has_requests(self) -> bool:
        """Return whether any request runs or waits."""
        return bool(self._running) or super().has_requests()

    def tokens_in_flight(self) -> int:
        """Count the tokens sampled so far for running responses."""
        return sum(len(one.tokens) for one in list(self._running))

    def plan(self, multiple: int) -> PagedRows:
        """Admit requests that fit, and lay out the next forward; requires at least one request.

        Args:
            multiple: rows are padded to a multiple of it by a segment that attends to itself, in slots behind the last
                block.
        """
        self._admit()
        running = list(self._running)
        tokens, seen = [], []
        for one in running:
            tokens.append(np.array(one.tokens[-1:], np.int64) if one.tokens else one.request.tokens.astype(np.int64))
            seen.append(one.slots[: len(one.request.tokens) + len(one.tokens)])
        missing = -sum(map(len, tokens)) % multiple
        if missing:
            tokens.append(np.zeros(missing, np.int64))
            seen.append(np.arange(missing) + self._num_blocks * self._block_size)
        lengths, key_lengths = ([len(part) for part in parts] for parts in (tokens, seen))
        return PagedRows(
            running,
            np.concatenate(tokens),
            np.concatenate([np.arange(k - n, k) for n, k in zip(lengths, key_lengths, strict=True)]),
            np.concatenate([part[-n:] for part, n in zip(seen, lengths, strict=True)]),
            np.cumsum([0, *lengths], dtype=np.int32),
            np.concatenate(seen),
            np.cumsum([0, *key_lengths], dtype=np.int32),
        )

    def record_routes(self, rows: PagedRows, routes: np.ndarray) -> None:
        """Record the experts [t, layers, choices] of a forward, before `record`."""
        for one, start, stop in zip(rows.running, rows.bounds, rows.bounds[1:], strict=False):
            one.routes.append(routes[start:stop])

    def record(
        self, rows: PagedRows, tokens: Sequence[int], logprobs: Sequence[float], kept: KeptSets | None = None
    ) -> list[Sampled]:
        """Append sampled tokens and the sets they were drawn from; return finished responses in order of admission."""
        finished, sets = [], kept.split() if kept else [None] * len(tokens)
        for one, token, logprob, kept_set in zip(rows.running, tokens, logprobs, sets, strict=True):
            one.tokens.append(token)
            one.logprobs.append(logprob)
            if kept_set is not None:
                one.kept.append(kept_set)
            is_stop = token in one.request.sampling.stop_token_ids
            if not is_stop and self._stop is not None:
                is_stop = one.request.ends_by(self._stop, one.tokens)
            if is_stop or len(one.tokens) == one.request.sampling.max_tokens:
                self._end(one)
                finished.append(one.finish("stop" if is_stop else "length"))
        return finished

    def _count_blocks(self, request: Request) -> int:
        """Count a request's blocks at its maximum length; the last token needs no slot."""
        return -(-(len(request.tokens) + request.sampling.max_tokens - 1) // self._block_size)

    def _admit(self) -> None:
        """Admit waiting requests in order, until one does not fit or has another sampling distribution."""
        rows = len(self._running)
        while self._waiting and len(self._running) < self._max_num_seqs:
            request = self._waiting[0]
            count = self._count_blocks(request)
            is_alike = all(one.request.sampling.draws_like(request.sampling) for one in self._running[:1])
            if not is_alike or count > len(self._free) or (rows and rows + len(request.tokens) > self._max_tokens):
                return
            blocks = np.array([self._free.pop() for _ in range(count)], np.int64)
            slots = (blocks[:, None] * self._block_size + np.arange(self._block_size)).ravel()
            self._running.append(Running(request, slots, torch.Generator().manual_seed(request.seed)))
            del self._waiting[0]
            rows += len(request.tokens)

    def _end(self, one: Running) -> None:
        self._running.remove(one)
        self._free += (one.slots[:: self._block_size] // self._block_size).tolist()
