# SPDX-License-Identifier: Apache-2.0
"""An engine on a rank that is not one of an engine's."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from megatron_rl.engines.protocol import EngineWeights, Sampled
from megatron_rl.engines.waiting import WaitingRequests
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.weights.tables import PlacementTable, as_table


@dataclass(frozen=True)
class EngineTables:
    """Which rank of the engines holds what: all that other ranks must know to send it weights.

    Attributes:
        keys: rank -> its `shard_key`.
        tables: by key; tables that share rows still share them when all of this travels at once.
    """

    keys: Mapping[int, Hashable]
    tables: Mapping[Hashable, PlacementTable]

    @classmethod
    def of(cls, engine: EngineWeights, ranks: EngineRanks) -> EngineTables:
        """What an engine says of all of them."""
        keys = {rank: engine.shard_key(rank) for members in ranks.of for rank in members}
        firsts = {key: rank for rank, key in reversed(keys.items())}
        return cls(keys, {key: as_table(engine.placements(rank)) for key, rank in firsts.items()})


class AbsentEngine(WaitingRequests):
    """Stands for an engine where there is none: no request comes to it, and it has no parameters."""

    def __init__(self, known: EngineTables) -> None:
        super().__init__()
        self._known = known
        self.params: Mapping[str, torch.Tensor] = {}
        self.shared_params: frozenset[str] = frozenset()
        self.padded_params: tuple[str, ...] = ()

    def shard_key(self, rank: int) -> Hashable:
        """Of a rank that has an engine."""
        return self._known.keys[rank]

    def placements(self, rank: int) -> PlacementTable:
        """Of a rank that has an engine."""
        return self._known.tables[self._known.keys[rank]]

    def step(self) -> list[Sampled]:
        """There is nothing to do."""
        return []

    def tokens_in_flight(self) -> int:
        """None."""
        return 0

    def begin_weight_update(self) -> None:
        """There is nothing to write to."""

    def end_weight_update(self) -> None:
        """As above."""

    def sleep(self) -> None:
        """There is nothing to give back."""

    def close(self) -> None:
        """As above."""
