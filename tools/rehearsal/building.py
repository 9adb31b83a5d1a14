# SPDX-License-Identifier: Apache-2.0
"""The roles of a rehearsed rank, built by a run's own code."""

from __future__ import annotations

from typing import Any

from megatron_rl.parallel.groups import ParallelGroups, build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import Job
from megatron_rl.run.building import build_role
from megatron_rl.run.models import RoleInputs
from megatron_rl.training.roles.frozen import BaseOfActor
from megatron_rl.training.setup import LearnedTeacher
from tools.rehearsal.ledger import Ledger

_GROUPS = ("tp", "cp", "pp", "dp", "dp_cp", "ep", "expt_dp", "tp_cp", "tp_ep", "tp_pp", "tp_ep_pp", "embd")


def build_rehearsed(job: Job, rank: int, ledger: Ledger) -> dict[str, Any]:
    """Build a rank's roles by name, and name their groups in the ledger."""
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
            for group in (*_GROUPS, "intra_dp_cp", "intra_expt_dp"):
                found = getattr(groups[layout].collection, group, None)
                if found is not None:
                    ledger.name_group(found, group)
            for found in filter(None, groups[layout].replicas):
                ledger.name_group(found, "replicas")
        inputs = RoleInputs(spec, job.shape_of(spec), layout)
        teacher = find_teacher(job) if name == "actor" else None
        roles[name] = build_role(job.config, inputs, groups[layout], 100, teacher=teacher)
    return roles


def find_teacher(job: Job) -> LearnedTeacher | None:
    """Return the teacher whose distributions the actor learns, if any."""
    teachers, distillation = [*job.spec.teachers.values()], job.config.algorithm.distillation
    if not teachers or distillation.kind == "sampled":
        return None
    return LearnedTeacher(distillation, teachers[0].path, job.shape_of(teachers[0]))
