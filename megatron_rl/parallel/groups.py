# SPDX-License-Identifier: Apache-2.0
"""Process groups of one role, built from its ParallelLayout and passed explicitly.

megatron-core takes them as a `ProcessGroupCollection`; no group is registered in its global
`parallel_state`, so that several roles with different layouts can live in one process. (Only its
layout-free scratch memory for all-gathers is created there.)
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_rl.parallel.layout import Coordinates, ExpertCoordinates, ParallelLayout


@dataclass(frozen=True)
class ParallelGroups:
    """The groups this rank belongs to.

    Attributes:
        layout: the sizes.
        at: this rank's coordinates.
        expert_at: its coordinates in expert layers.
        world: all ranks of the role.
        tp, pp, cp, dp: one axis each.
        tp_pp: one model replica without CP ("mp" in Megatron's words): gradient norms.
        dp_cp: everything that sees the same parameters: gradient reduction, loss denominators.
        collection: the same groups as megatron-core wants them.
    """

    layout: ParallelLayout
    at: Coordinates
    expert_at: ExpertCoordinates
    world: dist.ProcessGroup
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    tp_pp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    collection: ProcessGroupCollection

    @property
    def is_first_stage(self) -> bool:
        """True on ranks of the first pipeline stage."""
        return self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """True on ranks of the last pipeline stage (the one with the logits)."""
        return self.at.pp == self.layout.pp_size - 1

    @property
    def is_replica_leader(self) -> bool:
        """True on one rank of each model replica: the first of its TP, CP and PP ranks."""
        return self.at.tp == self.at.cp == self.at.pp == 0

    @property
    def is_last_stage_leader(self) -> bool:
        """True on one rank of each model replica: the first of the TP and CP ranks of its last stage."""
        return self.at.tp == self.at.cp == 0 and self.is_last_stage

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage in this rank's pipeline."""
        at = self.at
        return self.layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=self.layout.pp_size - 1)


def build_groups(layout: ParallelLayout, timeout: timedelta | None = None) -> ParallelGroups:
    """Create the process groups of `layout`; collective over the default group.

    Every rank creates every group, in the same order.
    """
    rank = dist.get_rank()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()

    def mine(rank_lists: list[list[int]]) -> dist.ProcessGroup | None:
        found = None
        for ranks in rank_lists:
            group = dist.new_group(ranks, timeout=timeout)
            if rank in ranks:
                found = group
        return found

    tp, pp, cp, dp = (mine(layout.groups(axis)) for axis in ("tp", "pp", "cp", "dp"))
    tp_pp, dp_cp, tp_cp = (mine(layout.groups(*axes)) for axes in (("tp", "pp"), ("dp", "cp"), ("tp", "cp")))
    tp_dp_cp = mine(layout.groups("tp", "dp", "cp"))
    ep, expt_tp, expt_dp = (mine(layout.expert_groups(axis)) for axis in ("ep", "tp", "dp"))
    tp_ep, tp_ep_pp = (mine(layout.expert_groups(*axes)) for axes in (("tp", "ep"), ("tp", "ep", "pp")))
    first_and_last = [[ranks[0], ranks[-1]] if len(ranks) > 1 else ranks for ranks in layout.groups("pp")]
    embd = mine(first_and_last)
    # The distributed optimizer has one instance: its partial ("intra") groups are the whole data parallel groups.
    collection = ProcessGroupCollection(
        tp=tp, pp=pp, cp=cp, dp=dp, mp=tp_pp, dp_cp=dp_cp, tp_cp=tp_cp, tp_dp_cp=tp_dp_cp,
        embd=embd, pos_embd=None, ep=ep, expt_tp=expt_tp, tp_ep=tp_ep, tp_ep_pp=tp_ep_pp, expt_dp=expt_dp,
        intra_dp_cp=dp_cp, intra_expt_dp=expt_dp, intra_dist_opt=dist.group.WORLD, inter_dist_opt=None, hcp=None,
    )
    return ParallelGroups(
        layout=layout, at=layout.coordinates(rank), expert_at=layout.expert_coordinates(rank),
        world=dist.group.WORLD, tp=tp, pp=pp, cp=cp, dp=dp, tp_pp=tp_pp, dp_cp=dp_cp, collection=collection,
    )
