# SPDX-License-Identifier: Apache-2.0
"""Ranks of the roles that the section `placement` gives places of their own, and the places that it refuses."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from megatron_rl.types import UserError


def resolve_places(places: Mapping[str, str], world_size: int) -> dict[str, range]:
    """Return the ranks of roles by name.

    Args:
        places: role -> its ranks as the config gives them, such as "0-3" or "1/2", in the order of the section.

    Raises:
        UserError: a text is no range, a range exceeds the job, or a share is no whole number of ranks.
    """
    found, end = {}, 0  # a share begins after the role named before it, or at rank 0 if too few ranks are left
    for role, text in places.items():
        if "/" in text:
            count = _count_share(role, text, world_size)
            first = end if end + count <= world_size else 0
            found[role] = range(first, first + count)
        else:
            found[role] = _read_range(role, text, world_size)
        end = found[role].stop
    return found


def _read_range(role: str, text: str, world_size: int) -> range:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not first <= last < world_size:
        raise UserError(
            f"placement.{role} = {text!r} in a job of {world_size} rank(s)",
            source=f"placement.{role}",
            expected=f"the first and the last of its ranks, such as 0-{world_size - 1}, or a share such as 1/2",
            hint="ranks count from 0; start more of them (--nproc-per-node), or name others",
        )
    return range(first, last + 1)


def _count_share(role: str, text: str, world_size: int) -> int:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    part, whole = (int(found[1]), int(found[2])) if found else (0, 1)
    if not 0 < part <= whole:
        raise UserError(
            f"placement.{role} = {text!r} is no share of the ranks",
            source=f"placement.{role}",
            expected="a fraction such as 1/4, more than 0 and at most 1",
            hint="write it with two whole numbers",
        )
    count, rest = divmod(world_size * part, whole)
    if rest:
        raise UserError(
            f"placement.{role} = {text!r} of {world_size} rank(s) is no whole number of ranks",
            source=f"placement.{role}",
            expected=f"a number of ranks that {whole // math.gcd(part, whole)} divides",
            hint="start another number of ranks (--nproc-per-node), or choose another share",
        )
    return count


def check_places(ranks: Mapping[str, range], world_size: int, actor: str | None, shared_by: str | None) -> None:
    """Refuse places that leave out rank 0 or another rank, or part an engine from the actor that it runs (UserError).

    Args:
        ranks: of every role of the run, and of "rollout".
        actor: the actor's place as the config gives it.
        shared_by: the engine, if it runs the actor's modules.
    """
    if ranks["actor"].start:
        raise UserError(
            f"placement.actor = {actor!r} leaves out rank 0",
            source="placement.actor",
            expected="ranks from 0 on",
            hint="rank 0 writes the actor's metrics: give the other roles the ranks behind the actor's",
        )
    idle = sorted(set(range(world_size)).difference(*ranks.values()))
    if idle:
        raise UserError(
            f"rank {idle[0]} has no role" if len(idle) == 1 else f"ranks {', '.join(map(str, idle))} have no role",
            source="placement",
            expected=f"a role for each of the {world_size} ranks",
            hint="start fewer ranks, or give these to a role; roles that are not named are on all ranks",
        )
    if ranks["rollout"] != ranks["actor"] and shared_by is not None:
        raise UserError(
            f"rollout.engine = {shared_by!r} on other ranks than the actor, whose modules it runs",
            source="placement.rollout",
            expected="the ranks of the actor",
            hint="set placement.rollout to the ranks of placement.actor, or choose another rollout.engine",
        )
