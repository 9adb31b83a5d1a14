# SPDX-License-Identifier: Apache-2.0
"""Data parallel ranks of one engine, which step together (`rollout.data_parallel_size`).

Each layer exchanges tokens between all ranks of the engine, which share one set of experts. A rank without requests
therefore takes part in every step with a batch of its own (vLLM's dummy batch), and all ranks learn of the responses
that any of them finishes. To `rollout.generation` they are one engine: its ranks get equal requests and return equal
results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.engines.protocol import Request, RolloutEngine, Sampled
from megatron_rl.parallel.collectives import gather_objects

_KEPT_HOMES = 1 << 16  # samples whose rank is remembered between their requests


class LockStep:
    """A `RolloutEngine` over the engines of DP ranks, each of which has the requests of its own samples.

    Args:
        engine: whose `step` takes part in the others' steps if it has no requests.
        group: CPU group of the DP ranks.
    """

    def __init__(self, engine: RolloutEngine, group: dist.ProcessGroup) -> None:
        self._engine, self._group, self._rank = engine, group, group.rank()
        self.close, self.tokens_in_flight = engine.close, engine.tokens_in_flight
        self.load: dict[str, float] | None = getattr(engine, "load", None)
        self._homes: dict[int, int] = {}  # sample -> its DP rank, which has its tokens in the prefix cache
        self._running: dict[int, int] = {}  # likewise, of samples with a request

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests: of new samples on the ranks with the fewest, of others on the rank that they were on."""
        loads = Counter(self._running.values())
        for request in requests:
            is_new = not request.turn and not request.num_sampled
            home = None if is_new else self._homes.get(request.key)
            if home is None:
                home = min(range(self._group.size()), key=loads.__getitem__)
            loads[home] += 1
            self._homes.pop(request.key, None)
            self._homes[request.key] = self._running[request.key] = home
        for key in list(self._homes)[: max(0, len(self._homes) - _KEPT_HOMES)]:
            del self._homes[key]
        self._engine.add([request for request in requests if self._running[request.key] == self._rank])

    def step(self) -> list[Sampled]:
        """Run one forward on every rank; return the responses that any of them finishes; collective."""
        try:
            return self._share(self._engine.step())
        except BaseException:
            self._running.clear()  # the engine has none after an error, and other ranks may not answer
            raise

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Remove requests; return partial responses; collective if any of these requests runs."""
        if self._running.keys().isdisjoint(keys):
            return []
        return self._share(self._engine.interrupt(keys))

    def has_requests(self) -> bool:
        """Return whether any request of any rank runs or waits."""
        return bool(self._running)

    def _share(self, mine: list[Sampled]) -> list[Sampled]:
        """Return the responses of all ranks, rank by rank; collective."""
        count = torch.tensor([len(mine)])
        dist.all_reduce(count, group=self._group)
        parts: list[Any] = gather_objects(mine, self._group) if count else []
        found = [sampled for part in parts for sampled in part]
        for sampled in found:
            self._running.pop(sampled.key, None)
        return found
