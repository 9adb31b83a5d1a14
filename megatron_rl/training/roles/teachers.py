# SPDX-License-Identifier: Apache-2.0
"""Teachers of a run as called by the main loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.distillation import finish_divergences, mix_logprobs, sum_divergences
from megatron_rl.config.algorithm import DistillationConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompts import choose_teachers
from megatron_rl.parallel.collectives import reduce_scalars
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.samples.experience import Column, Experience
from megatron_rl.samples.pack import Packer
from megatron_rl.training.roles.on_samples import ActorOnSamples, RoleOnSamples


@dataclass(frozen=True)
class _Lesson:
    """Output of one teacher for its part of the samples.

    Attributes:
        order: index of each sequence of `part` among all sequences.
    """

    teacher: str
    part: Experience
    order: np.ndarray
    column: Column


class TeachersOnSamples:
    """All teachers of a run; the methods are collective over all ranks."""

    def __init__(
        self, teachers: Mapping[str, Any], packers: Mapping[str, Packer], policy: ActorOnSamples, config: RunConfig
    ) -> None:
        self._policy, self._config = policy, config
        self._teachers = {name: RoleOnSamples(role, packers[name]) for name, role in teachers.items()}

    def score(self, samples: Experience) -> None:
        """Run each teacher on the samples chosen for it; `teach` later passes the results to the policy."""
        chosen = choose_teachers(self._config, samples.prompts)
        parts = {name: samples.select(groups) for name, groups in chosen.items() if groups}
        for name, (part, _) in parts.items():
            self._teachers[name].read(part)  # send tokens to all teachers before one computes
        samples.lessons = [
            _Lesson(name, part, order, self._teachers[name].compute(partial(self._compute, name), part))
            for name, (part, order) in parts.items()
        ]

    def _compute(self, name: str, batch: TrainBatch) -> torch.Tensor:
        vocab_size = self._policy.model.shape.vocab_size
        return ask_teacher(self._teachers[name].role, self._config.algorithm.distillation, vocab_size, batch)

    def teach(self, samples: Experience) -> dict[str, float]:
        """Transfer the teachers' outputs to the policy, as a column of the samples.

        Returns:
            `distill/kl`, the mean log-prob of the policy minus the teachers', also per teacher if there are several;
            empty if distributions are compared, whose divergence the update measures.
        """
        packer = self._policy.packer
        found = {
            lesson.teacher: samples.take(lesson.column, lesson.order, lesson.part, packer) for lesson in samples.lessons
        }
        kind = self._config.algorithm.distillation.kind
        if kind != "sampled":  # each token has one teacher
            column = self._policy.as_column(samples, _lay_together(list(found.values())).nan_to_num(0.0))
            if kind == "full":
                samples.teacher_hidden = column
            else:
                samples.teacher_top_k = column
            return {}
        samples.teacher_logprobs = self._policy.as_column(samples, self._mix(found))
        return self._measure(samples, found)

    def _mix(self, found: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self._config.algorithm.distillation.choose_by is not None:
            return _lay_together(list(found.values()))
        return mix_logprobs(list(found.values()), [self._config.teachers[name].weight for name in found])

    def _measure(self, samples: Experience, found: Mapping[str, torch.Tensor]) -> dict[str, float]:
        batch = self._policy.read(samples, "old_logprobs", "teacher_logprobs")
        if not self._policy.is_here:
            return {}
        each = found if len(self._teachers) > 1 else {}
        sums = sum_divergences(
            {**each, "kl": batch.column("teacher_logprobs")}, batch.column("old_logprobs"), batch.loss_mask
        )
        group = self._policy.model.groups.dp
        return finish_divergences(reduce_scalars(sums, dist.ReduceOp.SUM, group, batch.tokens.device))


def ask_teacher(role: Any, distillation: DistillationConfig, vocab_size: int, batch: TrainBatch) -> torch.Tensor:
    """Compute the teacher output for the configured kind of distillation."""
    if distillation.kind == "full":
        return role.compute_hidden(batch)
    if distillation.kind == "top_k":
        common = min(vocab_size, role.model.shape.vocab_size)
        return role.compute_top_k(min(distillation.k, common), common, batch)
    return role.compute_logprobs(batch)


def _lay_together(parts: list[torch.Tensor]) -> torch.Tensor:
    """Merge tensors [t, ...] that have values at disjoint tokens and NaN elsewhere."""
    whole = parts[0]
    for part in parts[1:]:
        whole = torch.where(whole.isnan(), part, whole)
    return whole
