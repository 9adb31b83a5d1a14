# SPDX-License-Identifier: Apache-2.0
"""Construction of the engine that `rollout.engine` names, and the line of the log about its modes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.protocol import EngineMaker, EngineSpec, EngineWeights, PlacedEngine, RolloutEngine
from megatron_rl.extension.registry import ENGINES
from megatron_rl.parallel.imports import kept_imports
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.types import RouteShape


class BuiltEngine(NamedTuple):
    """One rank's share of an engine."""

    requests: RolloutEngine
    weights: EngineWeights
    kind: str  # class name of the engine
    ranks: EngineRanks
    route_shape: RouteShape | None = None  # shape of the expert choices (routes) in responses, if recorded

    def absent(self) -> BuiltEngine:
        """Build the stand-in for ranks without an engine; it contains the placement tables of all engine ranks."""
        from megatron_rl.engines.wrappers import AbsentEngine

        keys = {rank: self.weights.shard_key(rank) for members in self.ranks.of for rank in members}
        firsts = {key: rank for rank, key in reversed(keys.items())}
        stand_in = AbsentEngine(keys, {key: self.weights.placements(rank) for key, rank in firsts.items()})
        return self._replace(requests=stand_in, weights=stand_in)


def import_library(name: str, device: torch.device) -> None:
    """Import vLLM if `name` (rollout.engine) is "vllm"; exempt all existing objects from garbage collection."""
    with kept_imports():
        if name == "vllm":
            from megatron_rl.engines.vllm.vllm_library import prepare_vllm

            prepare_vllm(device)


def describe_engine(config: RolloutConfig, device: torch.device, records_routes: bool = False) -> str:
    """Describe for the log how vLLM or SGLang runs; "" for other engines."""
    if config.supports("vllm_modes"):
        from megatron_rl.engines.vllm.vllm_settings import describe_modes

        return describe_modes(config, device, records_routes)
    if config.engine == "sglang" and device.type == "cpu":
        return "seeds of responses have no effect on CPU: the same run again samples something else"
    return ""


def build_engine(spec: EngineSpec, make: EngineMaker | None = None) -> BuiltEngine:
    """Build the engine that `rollout.engine` names (UserError: unknown or unsuitable layout), or `make`; collective."""
    make = make or ENGINES[spec.config.engine].make
    config = spec.config
    if config.ranks_per_engine > 1:
        from megatron_rl.weights.support import check_rollout_layout

        check_rollout_layout(spec.shape, config.tensor_model_parallel_size, config.expert_parallel_size)
    engine = make(spec)
    if isinstance(engine, RolloutEngine):
        requests: RolloutEngine = engine
    else:
        from megatron_rl.engines.wrappers import OneTurn

        requests = OneTurn(engine)
    if config.data_parallel_size > 1:
        from megatron_rl.engines.lock_step import LockStep

        parallel: Any = engine  # vLLM's
        requests = LockStep(requests, parallel.dp_group)
    if spec.thoughts is not None:
        from megatron_rl.engines.wrappers import ThinkingBudget

        requests = ThinkingBudget(requests, spec.thoughts)
    ranks = (
        engine.engine_ranks
        if isinstance(engine, PlacedEngine)
        else EngineRanks.consecutive(spec.ranks or range(spec.process.world_size), config.ranks_per_engine)
    )
    return BuiltEngine(requests, engine, type(engine).__name__, ranks, spec.route_shape)
