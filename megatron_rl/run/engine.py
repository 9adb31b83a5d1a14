# SPDX-License-Identifier: Apache-2.0
"""Build the rollout engine of a run and the transfer of the actor's weights into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_rl.checkpoint.side_files import find_model_files
from megatron_rl.config.schema import RunConfig
from megatron_rl.engines.build import BuiltEngine, build_engine
from megatron_rl.engines.protocol import EngineSpec, EngineWeights, ProbedEngine, StopStrings, Thoughts
from megatron_rl.observability.rollout_progress import RolloutProgress
from megatron_rl.observability.timers import PhaseTimers
from megatron_rl.parallel.collectives import Process, align_group_names, share_object, world
from megatron_rl.rollout.generation import RolloutGenerator
from megatron_rl.rollout.serving import open_channel
from megatron_rl.run.roles import group_timeout
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.roles.actor import Actor
from megatron_rl.transfer.aliasing import find_aliases
from megatron_rl.transfer.hybrid_engine import HybridEngine
from megatron_rl.weights.shard_box import ShardBox

if TYPE_CHECKING:
    from megatron_rl.agents.processes import AnyEpisodes


def probe_weights(weights: EngineWeights, actor: Actor, config: RunConfig) -> EngineWeights:
    """Wrap the weights of servers so that probing verifies them; leave other engines' weights unchanged."""
    if not config.rollout.supports("is_server"):
        return weights
    from megatron_rl.training.frozen_policy import score_sequences
    from megatron_rl.transfer.probe import ProbedWeights

    layout = actor.model.layout

    def score(sequences: Sequence[np.ndarray], skip: Sequence[int], temperature: float) -> list[np.ndarray]:
        found = None
        if isinstance(actor.model, PackedModel):
            found = [scores.numpy() for scores in score_sequences(actor.model, sequences, skip, temperature)]
        return share_object(found, world(), layout.first_rank) if layout.world_size < world().size() else found or []

    ask = weights.probe if isinstance(weights, ProbedEngine) else lambda: None
    return ProbedWeights(weights, ask, score, config.model.dtype, world())


def build_rollout(
    config: RunConfig,
    actor: Actor,
    process: Process,
    timers: PhaseTimers,
    progress: RolloutProgress,
    stop: StopStrings | None = None,
    thoughts: Thoughts | None = None,
    processes: AnyEpisodes | None = None,
) -> tuple[HybridEngine, RolloutGenerator]:
    """Build the engine, the transfer of the actor's weights, and the generator; collective."""

    def find_shareable(wanted: Sequence[ShardBox]) -> dict[str, torch.Tensor]:
        pairs = find_shared(config, actor, process.rank, wanted)
        found = {name: actor.model.params[owned] for name, owned in pairs.items()}
        return {name: param for name, param in found.items() if isinstance(param, torch.Tensor)}

    engine = _build_engine(config, actor, process, find_shareable, stop, thoughts)
    group, engines = world(), engine.ranks
    weights = probe_weights(engine.weights, actor, config)
    hybrid = HybridEngine(
        actor, weights, engines=engines, process=process, group=group, config=config.hybrid, timers=timers
    )
    return hybrid, RolloutGenerator(
        engine,
        hybrid,
        open_channel(engines, process.rank, group_timeout(config)),
        config=config.rollout,
        run_seed=config.trainer.seed,
        group=group,
        progress=progress,
        agents=config.agents,
        processes=processes,
    )


def find_shared(config: RunConfig, actor: Actor, rank: int, wanted: Sequence[ShardBox]) -> dict[str, str]:
    """Return engine parameters that may alias the actor's storage: engine name -> actor name.

    Args:
        wanted: the engine's placement table on `rank` of the job.
    """
    model = actor.model
    if not config.hybrid.alias_weights or rank not in model.layout.ranks:
        return {}
    merged = model.merged_params if config.hybrid.lora == "merge" else frozenset()
    changed = merged | model.quantized_params
    pairs = find_aliases(model.placements(rank), wanted)
    return {name: owned for name, owned in pairs.items() if owned not in changed}


def _build_engine(
    config: RunConfig,
    actor: Actor,
    process: Process,
    shareable: Callable[[Sequence[ShardBox]], dict[str, torch.Tensor]],
    stop: StopStrings | None,
    thoughts: Thoughts | None,
) -> BuiltEngine:
    """Build this rank's share of an engine, or a stand-in; collective over the job."""
    ranks, built = config.placement.ranks_of("rollout", process.world_size), None
    if len(ranks) < process.world_size:
        align_group_names()  # an engine makes groups of its own ranks
    if process.rank in ranks:
        spec = EngineSpec(
            model_path=str(find_model_files(config.model.path)),
            shape=actor.model.shape,
            dtype=config.model.dtype,
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.data.max_response_length,
            config=config.rollout,
            process=process,
            seed=config.trainer.seed,
            shareable=shareable,
            model=actor.model,
            ranks=ranks,
            adapters=actor.model.adapters if config.hybrid.lora == "adapter" else None,
            stop=stop,
            records_routes=config.actor.router_replay == "engine",
            thoughts=thoughts,
        )
        built = build_engine(spec)
    if len(ranks) < process.world_size:
        known = share_object(built and built.describe(), world(), ranks.start)
        built = built or BuiltEngine.absent(*known)
    assert built is not None
    return built
