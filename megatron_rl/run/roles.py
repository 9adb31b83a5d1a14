# SPDX-License-Identifier: Apache-2.0
"""Build process groups and roles from the checked inputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.parallel.groups import ParallelGroups, join_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.run.inputs import RlInputs
from megatron_rl.run.models import RoleInputs
from megatron_rl.run.parts import Parts
from megatron_rl.training.setup import AbsentRole, LaidOutModel, LearnedTeacher, RoleSetup


def launched_sizes() -> tuple[int, int]:
    """Return the ranks that torchrun started, in all and on this node (1 without torchrun)."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def group_timeout(config: RunConfig) -> timedelta:
    """Return the process groups' time limit, longer than the watchdog's, which explains the stall."""
    return timedelta(seconds=config.trainer.collective_timeout + 30)


def build_roles(config: RunConfig, inputs: RlInputs, parts: Parts) -> dict[str, Any]:
    """Build the roles of an RL run by name; roles of equal layout share process groups. Collective."""
    groups: dict[ParallelLayout, ParallelGroups | None] = {}
    roles: dict[str, Any] = {}
    for name, role in inputs.roles.items():
        if role.layout not in groups:
            groups[role.layout] = join_groups(role.layout, group_timeout(config))
        mine = groups[role.layout]
        make = parts.roles.get(name)
        if mine is None:
            roles[name] = AbsentRole(LaidOutModel(role.spec, role.shape, role.layout))
        elif role.spec.shares and make is None:
            from megatron_rl.training.roles.frozen import BaseOfActor

            roles[name] = BaseOfActor(roles[role.spec.shares])
        else:
            steps, teacher = _count_updates(name, config, inputs), _find_teacher(config, inputs)
            roles[name] = build_role(config, role, mine, steps, make=make, teacher=teacher if name == "actor" else None)
    if "mtp" in roles:
        roles["actor"].attach_mtp(roles["mtp"])
    return roles


def _find_class(spec: RoleSpec) -> Callable[[RoleSetup], Any]:
    if spec.is_teacher:
        from megatron_rl.training.roles.frozen import Teacher as found
    elif spec.name == "actor":
        from megatron_rl.training.roles.actor import Actor as found
    elif spec.name == "reference":
        from megatron_rl.training.roles.frozen import Reference as found
    elif spec.name == "critic":
        from megatron_rl.training.roles.critic import Critic as found
    elif spec.name == "reward_model":
        from megatron_rl.training.roles.frozen import RewardModel as found
    else:
        from megatron_rl.training.roles.mtp import Mtp as found
    return found


def _count_updates(name: str, config: RunConfig, inputs: RlInputs) -> int:
    """Return a role's optimizer steps in the whole run; steps of `critic_warmup` do not update the policy."""
    warmup = config.trainer.critic_warmup if "critic" in inputs.roles and name != "critic" else 0
    return max((inputs.plan.total_steps or 0) - warmup, 0) * inputs.plan.optimizer_steps_per_step


def _find_teacher(config: RunConfig, inputs: RlInputs) -> LearnedTeacher | None:
    names, distillation = list(inputs.spec.teachers), config.algorithm.distillation
    if not names or distillation.kind == "sampled":
        return None
    first = inputs.roles[f"teachers.{names[0]}"]
    return LearnedTeacher(distillation, first.spec.path, first.shape)


def build_role(
    config: RunConfig,
    inputs: RoleInputs,
    groups: ParallelGroups,
    total_optimizer_steps: int = 0,
    make: Callable[[RoleSetup], Any] | None = None,
    teacher: LearnedTeacher | None = None,
) -> Any:
    """Build one role with the weights of its path; collective.

    Args:
        total_optimizer_steps: length of its learning-rate schedule.
        make: the user's own class, if any.
        teacher: of an actor that learns from distributions.
    """
    return (make or _find_class(inputs.spec))(
        RoleSetup(
            spec=inputs.spec,
            model=config.model,
            shape=inputs.shape,
            groups=groups,
            seed=config.trainer.seed,
            temperature=config.rollout.temperature,
            total_optimizer_steps=total_optimizer_steps,
            teacher=teacher,
        )
    )
