# SPDX-License-Identifier: Apache-2.0
"""Continuous batching over a paged KV cache: scheduling and slots, without a model.

A slot holds a token's keys and values in every layer; `block_size` slots are a block. A response owns blocks for its
maximum length. A forward computes new prompts and the newest token of running responses as segments of one row: n new
tokens that attend to k >= n slots.

Requests start in order of arrival, if fewer than `max_num_seqs` run and their blocks are free. Hence no preemption, no
chunked prefill, no prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.engines.wrappers import WaitingRequests
from megatron_rl.types import KeptSets, RouteShape, UserError

if TYPE_CHECKING:
    from megatron_rl.engines.wrappers import StopStrings


@dataclass(eq=False)
class Running:
    """A response that is being sampled.

    Attributes:
        slots: [capacity] int64, KV-cache slots of its tokens in order.
        kept: set that each token was drawn from, if sampling is truncated.
        routes: experts of request and response tokens, in parts [s, layers, choices], if recorded.
    """

    request: Request
    slots: np.ndarray
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[KeptSets] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)

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
    """The t rows (tokens) of one forward: a segment per running response, and possibly a segment of padding.

    Attributes:
        running: responses that get a token.
        tokens, positions: [t] int64.
        slots: [t] int64, KV-cache slots to write.
        bounds: [num_segments + 1] int32, first row of each segment, and t.
        key_slots: [k] int64, slots to attend to, segment by segment.
        key_bounds: [num_segments + 1] int32, bounds of segments in `key_slots`.
    """

    running: Sequence[Running]
    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    bounds: np.ndarray
    key_slots: np.ndarray
    key_bounds: np.ndarray

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
