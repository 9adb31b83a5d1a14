# SPDX-License-Identifier: Apache-2.0
"""Construction of the engine that `rollout.engine` names, and its stand-in on other ranks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import NamedTuple

import torch

from megatron_rl.engines.protocol import (
    ClosedBatches,
    EngineMaker,
    EngineSpec,
    EngineWeights,
    PlacedEngine,
    RolloutEngine,
    Sampled,
    WaitingRequests,
)
from megatron_rl.extension.registry import find_engine
from megatron_rl.parallel.imports import kept_imports
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.types import RouteShape
from megatron_rl.weights.placement_tables import PlacementTable, as_table
from megatron_rl.weights.support import check_rollout_layout


@dataclass(frozen=True)
class EngineTables:
    """Placement tables (the boxes of HF tensors that a rank holds) of all engine ranks, for ranks without an engine.

    Attributes:
        keys: rank -> identifier of its table (`shard_key`).
        tables: identifier -> placement table.
    """

    keys: Mapping[int, Hashable]
    tables: Mapping[Hashable, PlacementTable]

    @classmethod
    def of(cls, engine: EngineWeights, ranks: EngineRanks) -> EngineTables:
        """Collect the placement tables of all engine ranks from one rank's view of the engine, one per shard key."""
        keys = {rank: engine.shard_key(rank) for members in ranks.of for rank in members}
        firsts = {key: rank for rank, key in reversed(keys.items())}
        return cls(keys, {key: as_table(engine.placements(rank)) for key, rank in firsts.items()})


class AbsentEngine(WaitingRequests, EngineWeights):
    """A stand-in on ranks without an engine."""

    def __init__(self, known: EngineTables) -> None:
        super().__init__()
        self._known = known
        self.params: Mapping[str, torch.Tensor] = {}
        self.shared_params: frozenset[str] = frozenset()
        self.padded_params: tuple[str, ...] = ()

    def shard_key(self, rank: int) -> Hashable:
        """Return the identifier of an engine rank's placement table."""
        return self._known.keys[rank]

    def placements(self, rank: int) -> PlacementTable:
        """Return the placement table (the boxes of HF tensors) of an engine rank."""
        return self._known.tables[self._known.keys[rank]]

    def step(self) -> list[Sampled]:
        """Return no responses."""
        return []

    def tokens_in_flight(self) -> int:
        """Return 0."""
        return 0

    def close(self) -> None:
        """Do nothing."""


class BuiltEngine(NamedTuple):
    """One rank's share of an engine.

    Attributes:
        kind: class name of the engine.
        route_shape: shape of the expert choices (routes) in responses, if recorded.
    """

    requests: RolloutEngine
    weights: EngineWeights
    kind: str
    ranks: EngineRanks
    route_shape: RouteShape | None = None

    def describe(self) -> tuple[str, EngineRanks, RouteShape | None, EngineTables]:
        """Return the arguments with which other ranks build a stand-in by `absent`."""
        return self.kind, self.ranks, self.route_shape, EngineTables.of(self.weights, self.ranks)

    @classmethod
    def absent(cls, kind: str, ranks: EngineRanks, route_shape: RouteShape | None, tables: EngineTables) -> BuiltEngine:
        """Build the stand-in for a rank without an engine."""
        stand_in = AbsentEngine(tables)
        return cls(stand_in, stand_in, kind, ranks, route_shape)


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


def import_library(name: str, device: torch.device) -> None:
    """Import vLLM if `name` (rollout.engine) is "vllm"; exempt all existing objects from garbage collection."""
    with kept_imports():
        if name == "vllm":
            from megatron_rl.engines.vllm.vllm_library import prepare_vllm

            prepare_vllm(device)


def build_engine(spec: EngineSpec) -> BuiltEngine:
    """Build the engine named by `rollout.engine`; collective over its ranks.

    Raises:
        UserError: unknown name or unsuitable layout.
    """
    make: EngineMaker = find_engine(spec.config.engine).make
    tp_size = spec.config.tensor_model_parallel_size
    check_rollout_layout(spec.shape, tp_size)
    engine = make(spec)
    requests = engine if isinstance(engine, RolloutEngine) else OneTurn(engine)
    if spec.thoughts is not None:
        from megatron_rl.engines.thinking import ThinkingBudget

        requests = ThinkingBudget(requests, spec.thoughts)
    ranks = (
        engine.engine_ranks
        if isinstance(engine, PlacedEngine)
        else EngineRanks.consecutive(spec.ranks or range(spec.process.world_size), tp_size)
    )
    return BuiltEngine(requests, engine, type(engine).__name__, ranks, spec.route_shape)
