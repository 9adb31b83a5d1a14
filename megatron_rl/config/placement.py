# SPDX-License-Identifier: Apache-2.0
"""The sections `placement`, `layout` and `hybrid`: ranks of roles, choice of layouts, transfer of weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from megatron_rl.config.sections import option
from megatron_rl.types import UserError


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """The switch between training and rollout: transfer of weights to the engine, and its verification."""

    transport: Literal["auto", "pull", "buckets"] = option(
        "auto", "pull: copy out of the memory of ranks on the same host; buckets: messages; auto: pull where possible."
    )
    bucket_bytes: int = option(32 << 20, "Size of a bucket; staging memory is at most two of them.", "bytes", gt=0)
    alias_weights: bool = option(True, "Let the engine use the actor's storage wherever both layouts agree.")
    lora: Literal["merge", "adapter"] = option(
        "merge", "How adapters reach the engine at a switch: merge: summed with the model; adapter (vllm): alone."
    )
    verify: Literal["off", "sample", "full"] = option(
        "sample", "Compare digests of training and rollout weights after each switch: none, a rotating part, or all."
    )


@dataclass(frozen=True, kw_only=True)
class AutoLayoutConfig:
    """Choice of the layouts; `layout: auto` is short for `layout: {mode: auto}` (docs/planning.md)."""

    mode: Literal["given", "auto"] = option(
        "given", "given: as the sections say; auto: the planner's fastest layout that fits."
    )
    lengths: str | None = option(
        None,
        "mode auto: lengths of responses, as tools/plan.py --lengths, by which schedule and placement are chosen, "
        "too; null: both stay.",
    )


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Ranks of the roles. Roles on different ranks work at the same time."""

    actor: str | None = option(None, "Ranks of the actor, from rank 0 on: 0-3, or a share, 1/4; default: all.")
    critic: str | None = option(None, "Ranks of the critic, such as 4-7 or 1/2; default: all.")
    reference: str | None = option(None, "Ranks of the reference, which has the actor's layout; default: all.")
    reward_model: str | None = option(None, "Ranks of the reward models; default: all.")
    teachers: dict[str, Any] = option({}, "Ranks of teachers by name: math: 4-7 or math: 1/2; default: all.")
    rollout: str | None = option(None, "Ranks of the rollout engines, such as 2-7 or 3/4; default: all.")

    def ranks_of(self, role: str, world_size: int) -> range:
        """Return the ranks of a role.

        Raises:
            UserError: a role has no range, a range exceeds the job, or a share is no whole number of ranks.
        """
        return self._resolve(world_size).get(role.partition(".further.")[0], range(world_size))

    def _resolve(self, world_size: int) -> dict[str, range]:
        """Return the ranks of all roles in `placed`, by role."""
        found, end = {}, 0  # a share begins after the role named before it, or at rank 0 if too few ranks are left
        for role in self.placed:
            text = self.text_of(role).strip()
            if "/" in text:
                count = _count_share(role, text, world_size)
                first = end if end + count <= world_size else 0
                found[role] = range(first, first + count)
            else:
                found[role] = _read_range(role, text, world_size)
            end = found[role].stop
        return found

    @property
    def placed(self) -> list[str]:
        """Roles with explicit ranks; a teacher is `teachers.NAME`."""
        found: list[str] = []
        for item in fields(self):
            if item.name == "teachers":
                found += [f"teachers.{name}" for name in self.teachers]
            elif getattr(self, item.name) is not None:
                found.append(item.name)
        return found

    def text_of(self, role: str) -> str:
        """Return a placed role's ranks as the config gives them, such as "0-3" or "1/2"."""
        section, _, teacher = role.partition(".")
        return str(self.teachers[teacher] if teacher else getattr(self, section))

    def describe(self, world_size: int) -> str:
        """Return a line like `actor on 0-1, critic on 2-3, others on all ranks`; empty if no role is placed."""
        if not self.placed:
            return ""
        named = (f"{role} on {format_ranks(ranks)}" for role, ranks in self._resolve(world_size).items())
        return ", ".join([*named, "others on all ranks"])


def format_ranks(ranks: range) -> str:
    """Format ranks as `2-3`, or `2` for a single one."""
    return f"{ranks.start}-{ranks.stop - 1}" if len(ranks) > 1 else f"{ranks.start}"


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
