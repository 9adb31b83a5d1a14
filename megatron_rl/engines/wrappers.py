# SPDX-License-Identifier: Apache-2.0
"""Parts of engines: the queue of local ones, whole batches, and stand-ins on other ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat, takewhile
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.engines.protocol import ClosedBatches, EngineWeights, Request, Sampled
from megatron_rl.weights.placement_tables import PlacementTable, as_table

if TYPE_CHECKING:
    import torch

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
        """Generate the responses to a batch of waiting requests.

        Surplus responses repeat the last key, so that the caller refuses them.
        """
        batch = self.take_batch()
        if not batch:
            return []
        responses = self._engine.generate([r.tokens for r in batch], [r.seed for r in batch], batch[0].sampling)
        keys = chain((r.key for r in batch), repeat(batch[-1].key))
        return [replace(response, key=key) for key, response in zip(keys, responses, strict=False)]


class AbsentEngine(WaitingRequests, EngineWeights):
    """A stand-in on ranks without an engine.

    Args:
        keys: engine rank -> identifier of its placement table (`shard_key`).
        tables: identifier -> boxes of that table.
    """

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
