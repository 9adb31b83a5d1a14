# SPDX-License-Identifier: Apache-2.0
"""Process groups of one role, built from its ParallelLayout and passed explicitly.

None is registered in megatron-core's global `parallel_state`, which holds only layout-free buffers, so roles with
different layouts can share a process.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_rl.parallel.collectives import align_group_names, connect, current_device, make_group
from megatron_rl.parallel.layout import Coordinates, ExpertCoordinates, ParallelLayout


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's process groups in one role (actor, critic, ...)."""

    layout: ParallelLayout
    # at, expert_at: this rank's coordinates in dense layers and in expert layers.
    at: Coordinates
    expert_at: ExpertCoordinates
    world: dist.ProcessGroup  # all ranks of the role
    # tp, pp, cp, dp: groups along one axis each.
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    collection: ProcessGroupCollection  # the groups for megatron-core
    # Ranks with this rank's ZeRO-3 shards of dense parameters, and of experts; `None` without replicas.
    replicas: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]

    @cached_property
    def is_last_stage(self) -> bool:
        """True on ranks of the last pipeline stage (with the logits)."""
        return self.at.pp == self.layout.pp_size - 1

    @cached_property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage in this rank's pipeline."""
        at = self.at
        return self.layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=self.layout.pp_size - 1)


def list_groups(layout: ParallelLayout, rank: int) -> dict[str, list[int]]:
    """Return the ranks of each group of `rank`, by megatron-core's name; "embd" (end stages) may exclude `rank`."""
    found = {
        "_".join(axes): layout.group_of(rank, *axes)
        for axes in (("tp",), ("pp",), ("cp",), ("dp",), ("tp", "pp"), ("dp", "cp"), ("tp", "cp"))
    }
    of_experts = dict(ep=("ep",), expt_tp=("tp",), expt_dp=("dp",), tp_ep=("tp", "ep"), tp_ep_pp=("tp", "ep", "pp"))
    found |= {name: layout.expert_group_of(rank, *axes) for name, axes in of_experts.items()}
    for name, size in zip(("dp_cp", "expt_dp"), layout.shard_sizes, strict=True):
        at = found[name].index(rank)
        found[f"intra_{name}"] = found[name][at - at % size :][:size]
        if layout.shard_size:
            found[f"inter_{name}"] = found[name][at % size :: size]
    found["embd"] = sorted({found["pp"][0], found["pp"][-1]})
    return found


def list_gather_buffers() -> list[torch.Tensor]:
    """Return megatron-core's buffers for gathered hidden states, one per dtype."""
    return [*parallel_state.get_global_memory_buffer().buffer.values()]


def build_groups(layout: ParallelLayout, timeout: timedelta | None = None) -> ParallelGroups:
    """Create the process groups of `layout` on its ranks; collective over the default group.

    Ranks outside the layout call `align_group_names` instead.

    Args:
        timeout: of new groups; the default group has its own.
    """
    rank = dist.get_rank()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    align_group_names()
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    of: dict[str, dist.ProcessGroup | None] = {}
    whole = {"world": [*layout.ranks]}
    # Names with equal groups on the first rank have equal groups on every rank.
    on_first = list_groups(layout, layout.first_rank) | whole
    # Ranks wait for members of their own groups only. This cannot deadlock: the order is the same on all ranks, and
    # groups of one name are disjoint.
    for name, ranks in (list_groups(layout, rank) | whole).items():
        key = tuple(on_first[name])
        if key not in made:
            made[key] = make_group(ranks, timeout)
        of[name] = made[key]
    connect(of["pp"], current_device())
    # There is one instance of the distributed optimizer: without ZeRO-3, "intra" groups are the whole data parallel
    # groups. `tp_dp_cp` only serves auxiliary losses, which are off.
    collection = ProcessGroupCollection(
        **{name: group for name, group in of.items() if name not in ("tp_pp", "world") and "inter_" not in name},
        mp=of["tp_pp"],
        pos_embd=None,
        tp_dp_cp=None,
        intra_dist_opt=of["world"],
        inter_dist_opt=None,
        hcp=None,
    )
    own = {name: group for name, group in of.items() if group is not None}  # middle stages have no "embd"
    if not torch.cuda.is_available() and 2 in (own["tp"].size(), own["pp"].size()):
        from megatron_rl.parallel.pairs import open_pair

        for name in ("tp", "pp"):
            open_pair(own[name], timeout)
    return ParallelGroups(
        layout=layout,
        at=layout.coordinates(rank),
        expert_at=layout.expert_coordinates(rank),
        collection=collection,
        replicas=(of.get("inter_dp_cp"), of.get("inter_expt_dp")),
        **{name: own[name] for name in ("world", "tp", "pp", "cp", "dp")},
    )


def join_groups(layout: ParallelLayout, timeout: timedelta | None = None) -> ParallelGroups | None:
    """Create the groups of a layout; `None` if this rank is not in it. Collective over the job."""
    if dist.get_rank() in layout.ranks:
        return build_groups(layout, timeout)
    align_group_names()
    return None
