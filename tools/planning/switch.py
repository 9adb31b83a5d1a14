# SPDX-License-Identifier: Apache-2.0
"""Predicted weight transfer: a run's reshard plan, counted for every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_rl.config.schema import FULLY_SHARDED
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import Job
from megatron_rl.planning.parameters import CODE_BYTES, SCALE_BYTES, is_coded
from megatron_rl.planning.role_layouts import DTYPE_BYTES
from megatron_rl.transfer.planner import Planner, Shard, group_shards
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import find_shard_key, megatron_placements
from megatron_rl.weights.placement_tables import as_table
from megatron_rl.weights.quantization import list_matrices, list_scales
from megatron_rl.weights.rollout_layout import vllm_placements
from megatron_rl.weights.row_shards import find_sharded_key, sharded_placements
from megatron_rl.weights.shard_box import ShardBox
from tools.planning.reshard_cost import (
    Bandwidths,
    Flow,
    Prediction,
    ReshardSummary,
    list_flows,
    predict_seconds,
    summarize,
)


@dataclass(frozen=True)
class SwitchPlan:
    """Bytes of a weight transfer, and a lower bound of its seconds."""

    summary: ReshardSummary
    prediction: Prediction


def build_shards(
    shape: ModelShape,
    layout: ParallelLayout,
    rollout_tp: int,
    engine_ranks: range | None = None,
    *,
    rollout_ep: int = 1,
    is_fully_sharded: bool = False,
    select: Callable[[Sequence[ShardBox]], Sequence[ShardBox]] = as_table,
) -> tuple[list[Shard], list[Shard]]:
    """Build the shards of training and of the engines.

    Args:
        rollout_tp, rollout_ep: TP and EP size of the engines.
        engine_ranks: default: all of `layout`.
        is_fully_sharded: whether the actor shards rows of every parameter (ZeRO-3).
        select: picks the transferred part of a table.
    """
    engines = layout.ranks if engine_ranks is None else engine_ranks

    def place(rank: int) -> int:
        return (rank - engines.start) % max(rollout_tp, rollout_ep)

    source = group_shards(
        lambda rank: select((sharded_placements if is_fully_sharded else megatron_placements)(shape, layout, rank)),
        partial(find_sharded_key if is_fully_sharded else find_shard_key, layout),
        layout.ranks,
    )
    destination = group_shards(
        lambda rank: select(vllm_placements(shape, tp_size=rollout_tp, place=place(rank), ep_size=rollout_ep)),
        place,
        engines,
    )
    return source, destination


def plan_switch(job: Job) -> SwitchPlan:
    """Build training's reshard plan, and count its bytes."""
    cluster = job.cluster
    summary = summarize(
        _list_flows(job),
        num_ranks=cluster.world_size,
        itemsize=1,
        ranks_per_node=cluster.gpus_per_node,
        bucket_bytes=job.config.hybrid.bucket_bytes,
    )
    return SwitchPlan(summary, predict_seconds(summary, Bandwidths(cluster.within_node, cluster.across_nodes)))


def _list_flows(job: Job) -> Iterator[Flow]:
    """Yield the flows of the weight transfer: sending ranks, receiving ranks and bytes."""
    for select, itemsize in _list_parts(job):
        source, destination = build_shards(
            job.shape,
            job.layout,
            job.engine_tp,
            job.rollout_ranks,
            rollout_ep=job.engine_ep,
            is_fully_sharded=job.config.actor.zero_stage == FULLY_SHARDED,
            select=select,
        )
        if job.engine_is_actor:
            destination = []  # the engine uses the actor's weights
        planner = Planner(source, destination, ranks_per_node=job.cluster.gpus_per_node)
        for origins, ranks, elements in list_flows(planner):
            yield origins, ranks, elements * itemsize


def _list_parts(job: Job) -> list[tuple[Callable[[Sequence[ShardBox]], Sequence[ShardBox]], int]]:
    """List the parts of the tables that are transferred separately, each with its bytes per element."""
    itemsize = DTYPE_BYTES[job.config.model.dtype]
    if not is_coded(job):
        return [(as_table, itemsize)]
    matrices = list_matrices(job.shape)
    rest = frozenset(job.shape.logical_tensors()) - matrices
    return [
        (lambda table: as_table(table).only(rest), itemsize),
        (lambda table: as_table(table).only(matrices), CODE_BYTES),
        (lambda table: list_scales(as_table(table).only(matrices)), SCALE_BYTES),
    ]
