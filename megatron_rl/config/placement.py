# SPDX-License-Identifier: Apache-2.0
"""The sections `placement` and `hybrid`: on which ranks each role lives, and how weights reach the engines."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Literal

from megatron_rl.config.declaring import option
from megatron_rl.types import UserError


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """The switch between training and rollout: how weights reach the engine, and what is checked."""

    transport: Literal["auto", "pull", "buckets"] = option(
        "auto", "pull: copy out of the memory of ranks on the same host; buckets: messages; auto: pull where possible."
    )
    bucket_bytes: int = option(32 << 20, "Size of a bucket; staging memory is at most two of them.", "bytes")
    alias_weights: bool = option(
        True, "Let the engine use the actor's own storage wherever both layouts agree: nothing moves, no second copy."
    )
    lora: Literal["merge", "adapter"] = option(
        "merge",
        "How adapters (actor.lora) reach the engine: merge: the sum of model and adapters is written into it at each "
        "switch; adapter (vllm): it has the model, shared or moved once, and at each switch the adapters alone.",
    )
    verify: Literal["off", "sample", "full"] = option(
        "sample", "Compare digests of training and rollout weights after each switch: none, a rotating part, or all."
    )


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Where roles live. Roles on different ranks work at the same time."""

    actor: str | None = option(None, "Ranks of the actor, such as 0-3, from rank 0 on; default: all.")
    critic: str | None = option(None, "Ranks of the critic, such as 4-7; default: all.")
    reference: str | None = option(None, "Ranks of the reference, which has the actor's layout; default: all.")
    reward_model: str | None = option(None, "Ranks of the reward model; default: all.")
    rollout: str | None = option(None, "Ranks of the rollout engines; default: all.")

    def ranks_of(self, role: str, world_size: int) -> range:
        """The ranks of a role.

        Args:
            role: name of a setting.
            world_size: ranks of the job.

        Raises:
            UserError: they are no range, or not all there.
        """
        text = getattr(self, role)
        if text is None:
            return range(world_size)
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not first <= last < world_size:
            raise UserError(
                f"placement.{role} = {text!r} in a job of {world_size} rank(s)",
                source=f"placement.{role}",
                expected=f"the first and the last of its ranks, such as 0-{world_size - 1}",
                hint="ranks count from 0; start more of them (--nproc-per-node), or name others",
            )
        return range(first, last + 1)

    @property
    def placed(self) -> list[str]:
        """The roles that have ranks of their own."""
        return [item.name for item in fields(self) if getattr(self, item.name) is not None]

    def describe(self) -> str:
        """`actor on 0-1, critic on 2-3, others on all ranks`; empty where all are on all ranks."""
        if not self.placed:
            return ""
        return ", ".join([*(f"{name} on {getattr(self, name)}" for name in self.placed), "others on all ranks"])
