# SPDX-License-Identifier: Apache-2.0
"""What must hold for roles on ranks of their own, once the size of the job and the roles of the run are known."""

from __future__ import annotations

from megatron_rl.config.run_spec import RunSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.types import UserError


def check_placement(cfg: RunConfig, spec: RunSpec, world_size: int) -> None:
    """Refuse a placement that does not fit the job, or that something in the config does not work with.

    Raises:
        UserError: the first thing found.
    """
    placement, num_ranks = cfg.placement, len(cfg.placement.ranks_of("rollout", world_size))
    endpoints, width = cfg.rollout.server.endpoints, cfg.rollout.tensor_model_parallel_size
    if endpoints and len(endpoints) * width != num_ranks:
        raise UserError(
            f"{len(endpoints)} server(s) for {num_ranks} rank(s), {width} per engine",
            source="rollout.server.endpoints",
            expected=f"{num_ranks // width} addresses, one per engine",
            hint="ranks that share a server are one engine: set rollout.tensor_model_parallel_size to their number",
        )
    if not placement.placed:
        return
    ranks = {role: placement.ranks_of(role, world_size) for role in (*spec.roles, "rollout")}
    if ranks["actor"].start:
        raise UserError(
            f"placement.actor = {placement.actor!r} leaves out rank 0",
            source="placement.actor",
            expected="ranks from 0 on",
            hint="rank 0 writes what the actor reports: give the other roles the ranks behind the actor's",
        )
    idle = sorted(set(range(world_size)).difference(*ranks.values()))
    if idle:
        raise UserError(
            f"rank {idle[0]} has no role" if len(idle) == 1 else f"ranks {', '.join(map(str, idle))} have no role",
            source="placement",
            expected=f"a role for each of the {world_size} ranks",
            hint="start fewer ranks, or give these to a role; roles that are not named are on all ranks",
        )
    if ranks["rollout"] != ranks["actor"] and cfg.rollout.supports("is_actor"):
        raise UserError(
            f"rollout.engine = {cfg.rollout.engine!r} on other ranks than the actor, whose modules it runs",
            source="placement.rollout",
            expected="the ranks of the actor",
            hint="set placement.rollout to the ranks of placement.actor, or choose another rollout.engine",
        )
