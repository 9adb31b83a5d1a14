# SPDX-License-Identifier: Apache-2.0
"""The switch of the weights on paper: the reshard plan of a run, counted for every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron_rl.config.zero_checks import FULLY_SHARDED
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import Job
from megatron_rl.planning.parameters import DTYPE_BYTES
from megatron_rl.resharding.classes import Shard
from megatron_rl.resharding.planner import Planner, group_shards
from megatron_rl.resharding.summary import Bandwidths, Prediction, ReshardSummary, predict_seconds, summarize
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.rollout_layout import vllm_placements
from megatron_rl.weights.row_shards import find_shard_key, training_placements


@dataclass(frozen=True)
class SwitchPlan:
    """Bytes of one switch and the seconds that they take at least."""

    summary: ReshardSummary
    prediction: Prediction


def build_shards(
    shape: ModelShape,
    layout: ParallelLayout,
    rollout_tp: int,
    engine_ranks: range | None = None,
    *,
    is_fully_sharded: bool = False,
) -> tuple[list[Shard], list[Shard]]:
    """Both sides of the move, as training and the engines lay them out; `engine_ranks`: default: all of `layout`."""
    engines = layout.ranks if engine_ranks is None else engine_ranks

    def place(rank: int) -> int:
        return (rank - engines.start) % rollout_tp

    source = group_shards(
        partial(training_placements, shape, layout, is_fully_sharded=is_fully_sharded),
        partial(find_shard_key, layout, is_fully_sharded=is_fully_sharded),
        layout.ranks,
    )
    destination = group_shards(
        lambda rank: vllm_placements(shape, tp_size=rollout_tp, tp_rank=place(rank)),
        place,
        engines,
    )
    return source, destination


def plan_switch(job: Job) -> SwitchPlan:
    """Make the plan that training executes, and count its bytes on every rank."""
    cluster = job.cluster
    source, destination = build_shards(
        job.shape,
        job.layout,
        job.engine_tp,
        job.rollout_ranks,
        is_fully_sharded=job.config.actor.zero_stage == FULLY_SHARDED,
    )
    if job.engine_is_actor:
        destination = []  # what it uses is there
    planner = Planner(source, destination, ranks_per_node=cluster.gpus_per_node)
    summary = summarize(
        planner.flows(),
        num_ranks=cluster.world_size,
        itemsize=DTYPE_BYTES[job.config.model.dtype],
        ranks_per_node=cluster.gpus_per_node,
        bucket_bytes=job.config.hybrid.bucket_bytes,
    )
    return SwitchPlan(summary, predict_seconds(summary, Bandwidths(cluster.within_node, cluster.across_nodes)))
