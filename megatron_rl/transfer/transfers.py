# SPDX-License-Identifier: Apache-2.0
"""Transfers of tensor sets from actor to engines; each has a resharder and a certificate."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_rl.config.placement import HybridConfig
from megatron_rl.engines.protocol import EngineWeights
from megatron_rl.parallel.collectives import Process
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.transfer.certificate import Certificate, CertifiedParams, count_once
from megatron_rl.transfer.executor import Resharder, Transport
from megatron_rl.transfer.planner import Planner, group_shards
from megatron_rl.weights.megatron_layout import PADDED_PARAMETERS
from megatron_rl.weights.placement_tables import as_table
from megatron_rl.weights.shard_box import ShardBox

if TYPE_CHECKING:
    from megatron_rl.transfer.computed import SourceParams


@dataclass(frozen=True)
class TensorSet:
    """Tensors that one transfer moves.

    Attributes:
        shapes: logical tensors by name.
        params: the actor's parameters on this rank.
        source, destination: placement tables of any actor or engine rank.
        computed: names in `params`, on any rank, that are computed when read.
        dtype: of the engine parameters to write; the model's if `None`.
        prepare: called before each transfer, on every rank of the job.
    """

    shapes: Mapping[str, tuple[int, ...]]
    params: SourceParams
    source: Callable[[int], Sequence[ShardBox]]
    destination: Callable[[int], Sequence[ShardBox]]
    computed: frozenset[str] = frozenset()
    dtype: torch.dtype | None = None
    prepare: Callable[[], None] = lambda: None

    def only(self, names: frozenset[str]) -> TensorSet:
        """Return the part with the named logical tensors."""
        return replace(
            self,
            shapes={name: size for name, size in self.shapes.items() if name in names},
            source=lambda rank: as_table(self.source(rank)).only(names),
            destination=lambda rank: as_table(self.destination(rank)).only(names),
        )


@dataclass(frozen=True)
class TransferContext:
    """Ranks, group and settings of the transfers of one model.

    Attributes:
        actor_key: actor rank -> key, equal for ranks with equal placements.
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


def split_types(tensors: TensorSet, context: TransferContext, wide: frozenset[str]) -> list[TensorSet]:
    """Split a tensor set by dtype: the engine's usual dtype, and float32 for `wide` (routers)."""
    wide = wide.intersection(tensors.shapes)
    if not wide:
        return [tensors]
    return [
        replace(tensors.only(frozenset(tensors.shapes) - wide), dtype=context.dtype),
        replace(tensors.only(wide), dtype=torch.float32),
    ]


class Transfer:
    """A prepared transfer of one tensor set; building it is collective."""

    def __init__(self, tensors: TensorSet, context: TransferContext) -> None:
        self._prepare, dtype = tensors.prepare, tensors.dtype or context.dtype
        engine, rank, ranks_per_node = context.engine, context.process.rank, context.process.ranks_per_node
        source = group_shards(tensors.source, context.actor_key, context.actor_ranks)
        destination = group_shards(
            lambda rank: as_table(tensors.destination(rank)).without(context.shared[rank]),
            lambda rank: (engine.shard_key(rank), context.shared[rank]),
            sorted(rank for ranks in context.engines.of for rank in ranks),
        )
        self.resharder = Resharder(
            Planner(source, destination, ranks_per_node=ranks_per_node).plan(rank),
            tensors.params,
            {name: param for name, param in engine.params.items() if tensors.dtype is None or param.dtype == dtype},
            context.group,
            Transport(context.config.bucket_bytes, context.config.transport, ranks_per_node),
            dtype=dtype,
            computed=tensors.computed,
        )
        index, place = context.engines.find(rank)
        ranks = context.engines.of[index] if index >= 0 else ()
        whole = group_shards(
            lambda place: tensors.destination(ranks[place]),
            lambda place: engine.shard_key(ranks[place]),
            range(len(ranks)),
        )
        counted = count_once(whole, place)
        written = {placement.param for placement in counted}
        padded = [name for name in tensors.params if name.endswith(PADDED_PARAMETERS)]
        self.certificate = Certificate(
            tensors.shapes,
            CertifiedParams(tensors.params, count_once(source, rank), padded),
            CertifiedParams(engine.params, counted, [name for name in engine.padded_params if name in written]),
            dtype=dtype,
            num_engines=len(context.engines.of),
            engine=index,
            group=context.group,
        )

    def run(self) -> None:
        """Run the transfer; collective."""
        self._prepare()
        self.resharder.run()
