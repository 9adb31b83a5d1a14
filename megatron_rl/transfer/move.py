# SPDX-License-Identifier: Apache-2.0
"""Moves of tensor sets from actor to engines; each has a resharder and a certificate."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_rl.config.placement import HybridConfig
from megatron_rl.engines.protocol import EngineWeights
from megatron_rl.parallel.collectives import Process
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.transfer.certificate import Certificate, Side, count_once
from megatron_rl.transfer.classes import Shard
from megatron_rl.transfer.computed import SourceParams
from megatron_rl.transfer.executor import Resharder, Transport
from megatron_rl.transfer.planner import group_shards, plan_rank
from megatron_rl.weights.megatron_layout import PADDED_PARAMETERS
from megatron_rl.weights.placement_tables import as_table
from megatron_rl.weights.shard_box import ShardBox


@dataclass(frozen=True)
class Cargo:
    """A set of tensors to move.

    Attributes:
        shapes: logical tensors by name.
        params: the actor's parameters on this rank.
        source, destination: placement tables of any actor or engine rank.
        computed: names in `params`, on any rank, that are computed when read.
        dtype: of the engine parameters to write; the model's if `None`.
        prepare: called before each move, on every rank of the job.
    """

    shapes: Mapping[str, tuple[int, ...]]
    params: SourceParams
    source: Callable[[int], Sequence[ShardBox]]
    destination: Callable[[int], Sequence[ShardBox]]
    computed: frozenset[str] = frozenset()
    dtype: torch.dtype | None = None
    prepare: Callable[[], None] = lambda: None

    def only(self, names: frozenset[str]) -> Cargo:
        """Return the part of the cargo with the named logical tensors."""
        return replace(
            self,
            shapes={name: size for name, size in self.shapes.items() if name in names},
            source=lambda rank: as_table(self.source(rank)).only(names),
            destination=lambda rank: as_table(self.destination(rank)).only(names),
        )


@dataclass(frozen=True)
class Way:
    """The ranks, group and settings of a move.

    Attributes:
        actor_ranks, actor_key: ranks of the actor; equal keys mean equal tables.
        shared: per rank, engine parameters that share the actor's storage.
        dtype: of most engine parameters.
    """

    actor_ranks: range
    actor_key: Callable[[int], Hashable]
    engine: EngineWeights
    shared: Sequence[frozenset[str]]
    engines: EngineRanks
    process: Process
    group: dist.ProcessGroup
    config: HybridConfig
    dtype: torch.dtype


def split_types(cargo: Cargo, way: Way, wide: frozenset[str]) -> list[Cargo]:
    """Split a cargo by dtype: the engine's usual dtype, and float32 for `wide` (routers)."""
    wide = wide.intersection(cargo.shapes)
    if not wide:
        return [cargo]
    return [
        replace(cargo.only(frozenset(cargo.shapes) - wide), dtype=way.dtype),
        replace(cargo.only(wide), dtype=torch.float32),
    ]


class Move:
    """A prepared move of one cargo; building it is collective."""

    def __init__(self, cargo: Cargo, way: Way) -> None:
        source = group_shards(cargo.source, way.actor_key, way.actor_ranks)
        self._prepare = cargo.prepare
        self.resharder = _build_resharder(cargo, way, source)
        self.certificate = _build_certificate(cargo, way, source)

    def run(self) -> None:
        """Move the cargo; collective."""
        self._prepare()
        self.resharder.run()


def _build_resharder(cargo: Cargo, way: Way, source: Sequence[Shard]) -> Resharder:
    destination = group_shards(
        lambda rank: as_table(cargo.destination(rank)).without(way.shared[rank]),
        lambda rank: (way.engine.shard_key(rank), way.shared[rank]),
        sorted(rank for ranks in way.engines.of for rank in ranks),
    )
    plan = plan_rank(way.process.rank, source, destination, ranks_per_node=way.process.ranks_per_node)
    dtype = cargo.dtype or way.dtype
    return Resharder(
        plan,
        cargo.params,
        {name: param for name, param in way.engine.params.items() if cargo.dtype is None or param.dtype == dtype},
        way.group,
        Transport(way.config.bucket_bytes, way.config.transport, way.process.ranks_per_node),
        dtype=dtype,
        computed=cargo.computed,
    )


def _build_certificate(cargo: Cargo, way: Way, source: Sequence[Shard]) -> Certificate:
    engine, (index, place) = way.engine, way.engines.find(way.process.rank)
    ranks = way.engines.of[index] if index >= 0 else ()
    destination = group_shards(
        lambda place: cargo.destination(ranks[place]), lambda place: engine.shard_key(ranks[place]), range(len(ranks))
    )
    counted = count_once(destination, place)
    written = {placement.param for placement in counted}
    return Certificate(
        cargo.shapes,
        Side(
            cargo.params,
            count_once(source, way.process.rank),
            [name for name in cargo.params if name.endswith(PADDED_PARAMETERS)],
        ),
        Side(engine.params, counted, [name for name in engine.padded_params if name in written]),
        dtype=cargo.dtype or way.dtype,
        num_engines=len(way.engines.of),
        engine=index,
        group=way.group,
    )
