# SPDX-License-Identifier: Apache-2.0
"""How much of what engines are asked to continue was in their prefix caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.parallel.collectives import reduce_scalars


class CacheUse:
    """Counts the requests of one engine in one generation."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        self._sums = {"asked": 0.0, "cached": 0.0}

    def ask(self, requests: Sequence[Request]) -> None:
        """Requests that the engine gets."""
        self._lengths |= {request.key: len(request.tokens) for request in requests}

    def hear(self, sampled: Sampled) -> None:
        """What came of one; not counted where the engine does not say."""
        length = self._lengths.pop(sampled.key, 0)
        if sampled.num_cached is not None:
            self._sums["asked"] += length
            self._sums["cached"] += sampled.num_cached

    def describe(self, counts: bool, group: dist.ProcessGroup) -> dict[str, float]:
        """The metric rollout/prefix_cache_hits, or none if no engine says; collective.

        Args:
            counts: this rank speaks for its engine.
            group: all ranks.
        """
        mine = self._sums if counts else dict.fromkeys(self._sums, 0.0)
        sums = reduce_scalars(mine, dist.ReduceOp.SUM, group, torch.device("cpu"))
        return {"rollout/prefix_cache_hits": sums["cached"] / sums["asked"]} if sums["asked"] else {}
