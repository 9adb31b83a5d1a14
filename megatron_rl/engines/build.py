# SPDX-License-Identifier: Apache-2.0
"""Construction of the engine that `rollout.engine` names, and its stand-in on other ranks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
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


class AbsentEngine(WaitingRequests, EngineWeights):
    """A stand-in on ranks without an engine.

    Args:
        keys: engine rank -> identifier of its placement table (`shard_key`).
        tables: identifier -> placement table.
    """

    def __init__(self, keys: Mapping[int, Hashable], tables: Mapping[Hashable, PlacementTable]) -> None:
        super().__init__()
        self._keys, self._tables = keys, tables
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


class BuiltEngine(NamedTuple):
    """One rank's share of an engine."""

    requests: RolloutEngine
    weights: EngineWeights
    kind: str  # class name of the engine
    ranks: EngineRanks
    route_shape: RouteShape | None = None  # shape of the expert choices (routes) in responses, if recorded

    def absent(self) -> BuiltEngine:
        """Build the stand-in for ranks without an engine; it contains the placement tables of all engine ranks."""
        keys = {rank: self.weights.shard_key(rank) for members in self.ranks.of for rank in members}
        firsts = {key: rank for rank, key in reversed(keys.items())}
        stand_in = AbsentEngine(keys, {key: as_table(self.weights.placements(rank)) for key, rank in firsts.items()})
        return self._replace(requests=stand_in, weights=stand_in)


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
