# SPDX-License-Identifier: Apache-2.0
"""Work of a rehearsed rank besides updates: scores, distillation targets, and a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch

from megatron_rl.checkpoint import saving
from megatron_rl.checkpoint.pieces import SavedRole
from megatron_rl.planning.cluster import Job
from megatron_rl.planning.memory import count_step_tokens
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.roles.frozen import ask_teacher


def score(job: Job, name: str, role: Any, batch: TrainBatch) -> None:
    """Run a role's scoring of a step."""
    spec = job.spec.roles[name]
    if spec.is_teacher:
        ask_teacher(role, job.config.algorithm.distillation, job.shape.vocab_size, batch)
    elif spec.head == "score":
        role.model.compute_forward(batch, role.head)
    else:
        (role.compute_values if spec.head == "value" else role.compute_logprobs)(batch)


def make_lessons(job: Job, num_tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return empty teacher outputs for a batch, sliced from the tensors of a whole step."""
    distillation = job.config.algorithm.distillation
    widths = [job.shape_of(teacher).hidden_size for teacher in job.spec.teachers.values()]
    size = {"sampled": (), "top_k": (2, distillation.k + 1), "full": (max(widths),)}[distillation.kind]
    column = {"sampled": "teacher_logprobs", "top_k": "teacher_top_k", "full": "teacher_hidden"}[distillation.kind]
    return {column: torch.zeros(max(num_tokens, count_step_tokens(job)), *size, device=device)[:num_tokens]}


def take_pieces(job: Job, roles: Mapping[str, Any], rank: int) -> None:
    """Copy a rank's checkpoint to the host."""
    with patch.object(saving, "count_steps", lambda role: role.optimizer.steps):
        for name, role in roles.items():
            if job.spec.roles[name].trainable:
                part = SavedRole(role.model.trained, role.optimizer)
                for piece in saving.list_pieces(part, rank, with_optimizer=True):
                    saving.copy_to_host(piece)
