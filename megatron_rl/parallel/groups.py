# SPDX-License-Identifier: Apache-2.0
"""Process groups of one role, built from its ParallelLayout and passed explicitly.

megatron-core takes them as a `ProcessGroupCollection`; no group is registered in its global
`parallel_state`, so that several roles with different layouts can live in one process. (Only its
layout-free scratch memory for all-gathers is created there.)
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_rl.parallel.collectives import align_group_names, connect, current_device, make_group
from megatron_rl.parallel.layout import Coordinates, ExpertCoordinates, ParallelLayout
from megatron_rl.parallel.pairs import open_pair


@dataclass(frozen=True)
class ParallelGroups:
    """The groups this rank belongs to.

    Attributes:
        layout: the sizes.
        at: this rank's coordinates.
        expert_at: its coordinates in expert layers.
        world: all ranks of the role.
        tp, pp, cp, dp: one axis each.
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
    collection: ProcessGroupCollection

    @property
    def is_last_stage(self) -> bool:
        """True on ranks of the last pipeline stage (the one with the logits)."""
        return self.at.pp == self.layout.pp_size - 1

    @property
    def is_last_stage_leader(self) -> bool:
        """True on one rank of each model replica: the first of the TP and CP ranks of its last stage."""
        return self.at.tp == self.at.cp == 0 and self.is_last_stage

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage in this rank's pipeline."""
        at = self.at
        return self.layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=self.layout.pp_size - 1)


def list_groups(layout: ParallelLayout, rank: int) -> dict[str, list[int]]:
    """Ranks of the groups of one rank by megatron-core's names of them; all but "embd" have `rank` in them."""
    found = {
        "_".join(axes): layout.group_of(rank, *axes)
        for axes in (("tp",), ("pp",), ("cp",), ("dp",), ("tp", "pp"), ("dp", "cp"), ("tp", "cp"))
    }
    found |= {
        name: layout.expert_group_of(rank, *axes)
        for name, axes in (
            ("ep", ("ep",)),
            ("expt_tp", ("tp",)),
            ("expt_dp", ("dp",)),
            ("tp_ep", ("tp", "ep")),
            ("tp_ep_pp", ("tp", "ep", "pp")),
        )
    }
    found["embd"] = sorted({found["pp"][0], found["pp"][-1]})
    return found


def list_gather_buffers() -> list[torch.Tensor]:
    """What tensor parallel ranks gather hidden states into, one of each type."""
    return [*parallel_state.get_global_memory_buffer().buffer.values()]


def free_gather_buffers() -> None:
    """Give them back; they are made again where they are needed."""
    parallel_state.get_global_memory_buffer().buffer.clear()


def build_groups(layout: ParallelLayout, timeout: timedelta | None = None) -> ParallelGroups:
    """Create the process groups of `layout` on its ranks; collective over the default group.

    Ranks that are not in the layout call `align_group_names` meanwhile.

    A rank creates the groups that it is in, and waits for their members only: a handful of calls, whatever the
    number of ranks. Groups that have the same ranks everywhere are one group, with one communicator.

    No rank waits for another in a circle: all create their groups in the same order, and the groups of one name have
    no rank in common.

    Args:
        layout: has this rank.
        timeout: of the groups; the default group, which serves where a group is all ranks, has its own.
    """
    rank = dist.get_rank()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    align_group_names()
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    of: dict[str, dist.ProcessGroup | None] = {}
    whole = {"world": [*layout.ranks]}
    on_first = (
        list_groups(layout, layout.first_rank) | whole
    )  # names whose groups are the same there have the same groups on every rank
    for name, ranks in (list_groups(layout, rank) | whole).items():
        key = tuple(on_first[name])
        if key not in made:
            made[key] = make_group(ranks, timeout)
        of[name] = made[key]
    connect(of["pp"], current_device())
    # The distributed optimizer has one instance: its partial ("intra") groups are the whole data parallel groups.
    # `tp_dp_cp` is of auxiliary losses, which are off.
    collection = ProcessGroupCollection(
        **{name: group for name, group in of.items() if name not in ("tp_pp", "world")},
        mp=of["tp_pp"],
        pos_embd=None,
        tp_dp_cp=None,
        intra_dp_cp=of["dp_cp"],
        intra_expt_dp=of["expt_dp"],
        intra_dist_opt=of["world"],
        inter_dist_opt=None,
        hcp=None,
    )
    own = {name: group for name, group in of.items() if group is not None}  # ranks between two ends have no "embd"
    for name in ("tp", "pp"):
        open_pair(own[name], timeout)
    return ParallelGroups(
        layout=layout,
        at=layout.coordinates(rank),
        expert_at=layout.expert_coordinates(rank),
        collection=collection,
        **{name: own[name] for name in ("world", "tp", "pp", "cp", "dp")},
    )


def join_groups(layout: ParallelLayout, timeout: timedelta | None = None) -> ParallelGroups | None:
    """The groups of a layout; None where this rank has no part in it. Collective over the job."""
    if dist.get_rank() in layout.ranks:
        return build_groups(layout, timeout)
    align_group_names()
    return None
