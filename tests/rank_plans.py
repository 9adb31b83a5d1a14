# SPDX-License-Identifier: Apache-2.0
"""The plans of all ranks and their flows: the reference for planning per class of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from megatron_rl.transfer.planner import Planner, RankPlan, Shard
from tools.planning.reshard_cost import Flow


def plan_all(
    source: Sequence[Shard], destination: Sequence[Shard], *, num_ranks: int, ranks_per_node: int
) -> list[RankPlan]:
    """Plan every rank."""
    planner = Planner(source, destination, ranks_per_node=ranks_per_node)
    return [planner.plan(rank) for rank in range(num_ranks)]


def plan_flows(plans: Iterable[RankPlan]) -> Iterator[Flow]:
    """Return the flows of rank plans, each counted on arrival."""
    for plan in plans:
        counts = {plan.rank: plan.local} | plan.receives
        yield (
            np.array(list(counts), np.int64),
            np.full(len(counts), plan.rank, np.int64),
            np.array([sum(op.num_elements for op in ops) for ops in counts.values()], np.int64),
        )
