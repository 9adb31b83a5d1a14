# SPDX-License-Identifier: Apache-2.0
"""The roles of a rehearsed rank, built by the same code as in a run."""

from __future__ import annotations

from typing import Any

from megatron_rl.parallel.groups import ParallelGroups, build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import Job
from megatron_rl.roles.build import build_role
from megatron_rl.roles.models import RoleInputs
from megatron_rl.roles.reference import BaseOfActor
from megatron_rl.training.setup import LearnedTeacher
from tools.rehearsal.ledger import Ledger

_GROUPS = ("tp", "cp", "pp", "dp", "dp_cp", "ep", "expt_dp", "tp_cp", "tp_ep", "tp_pp", "tp_ep_pp", "embd")


def build_rehearsed(job: Job, rank: int, ledger: Ledger) -> dict[str, Any]:
    """The roles that a rank has, by name; the ledger learns what their groups are called."""
    roles: dict[str, Any] = {}
    groups: dict[ParallelLayout, ParallelGroups] = {}
    for name, spec in job.spec.roles.items():
        layout = job.layout_of(spec)
        if rank not in layout.ranks:
            continue
        if spec.shares:
            roles[name] = BaseOfActor(roles[spec.shares])
            continue
        if layout not in groups:
            groups[layout] = build_groups(layout)
            for group in _GROUPS:
                found = getattr(groups[layout].collection, group, None)
                if found is not None:
                    ledger.name_group(found, group)
        inputs = RoleInputs(spec, job.shape_of(spec), layout)
        teacher = find_teacher(job) if name == "actor" else None
        roles[name] = build_role(job.config, inputs, groups[layout], 100, teacher=teacher)
    return roles


def find_teacher(job: Job) -> LearnedTeacher | None:
    """Whose distributions the actor learns from."""
    teachers, distillation = [*job.spec.teachers.values()], job.config.algorithm.distillation
    if not teachers or distillation.kind == "sampled":
        return None
    return LearnedTeacher(distillation, teachers[0].path, job.shape_of(teachers[0]))
