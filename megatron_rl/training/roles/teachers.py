# SPDX-License-Identifier: Apache-2.0
"""Teachers of a run as called by the main loop, for on-policy distillation (Agarwal et al., arXiv 2306.13649).

docs/distillation.md has the kinds; the estimate per token of kind sampled is as in Thinking Machines, "On-policy
distillation", 2025.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.algorithm import DistillationConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompts import choose_teachers
from megatron_rl.parallel.collectives import reduce_scalars
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.samples.experience import Experience
from megatron_rl.samples.pack import Packer
from megatron_rl.training.roles.on_samples import ActorOnSamples, RoleOnSamples


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
        given = self._config.algorithm.distillation, self._policy.model.shape.vocab_size
        lessons = {}  # by teacher: its output, the index of each sequence of its part among all sequences, and the part
        for name, (part, order) in parts.items():
            teacher = self._teachers[name]
            lessons[name] = teacher.compute(partial(ask_teacher, teacher.role, *given), part), order, part
        samples.lessons = lessons

    def teach(self, samples: Experience) -> dict[str, float]:
        """Transfer the teachers' outputs to the policy, as a column of the samples.

        Returns:
            `distill/kl`, the policy's mean log-prob minus the teachers', also per teacher if there are several;
            empty outside of the policy's ranks, and for kinds full and top_k, where the update measures it.
        """
        policy, distillation = self._policy, self._config.algorithm.distillation
        found = {name: samples.take(*lesson, packer=policy.packer) for name, lesson in samples.lessons.items()}
        parts = list(found.values())
        if distillation.kind != "sampled":  # each token has one teacher
            column = policy.as_column(samples, _lay_together(parts).nan_to_num(0.0))
            if distillation.kind == "full":
                samples.teacher_hidden = column
            else:
                samples.teacher_top_k = column
            return {}
        weights = [self._config.teachers[name].weight for name in found]
        mixed = _mix_logprobs(parts, weights) if distillation.choose_by is None else _lay_together(parts)
        samples.teacher_logprobs = policy.as_column(samples, mixed)
        batch = policy.read(samples, "old_logprobs", "teacher_logprobs")
        if not policy.is_here:
            return {}
        each = found if len(self._teachers) > 1 else {}
        return _measure_divergences({**each, "kl": batch.column("teacher_logprobs")}, batch, policy.model.groups.dp)


@torch.no_grad()
def _mix_logprobs(logprobs: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean of several teachers' log-probs [t], bitwise equal to the first if all are equal."""
    # The reverse divergence to it is, up to a constant, the weighted mean of the divergences to the teachers.
    mixed = first = logprobs[0]
    for others, weight in zip(logprobs[1:], weights[1:], strict=True):
        mixed = mixed + weight / sum(weights) * (others - first)
    return mixed


@torch.no_grad()
def _measure_divergences(
    teacher_logprobs: Mapping[str, torch.Tensor], batch: TrainBatch, group: dist.ProcessGroup
) -> dict[str, float]:
    """Return `distill/<name>`, the policy's mean log-prob minus the teacher's ([t], NaN if unscored); collective."""
    sums = {}
    for name, logprobs in teacher_logprobs.items():
        counted = batch.loss_mask & ~logprobs.isnan()
        sums[f"{name}/sum"] = float((batch.column("old_logprobs") - logprobs)[counted].double().sum())
        sums[f"{name}/count"] = float(counted.sum())
    sums = reduce_scalars(sums, dist.ReduceOp.SUM, group, batch.tokens.device)
    counted = [name for name in teacher_logprobs if sums[f"{name}/count"]]
    return {f"distill/{name}": sums[f"{name}/sum"] / sums[f"{name}/count"] for name in counted}


def ask_teacher(role: Any, distillation: DistillationConfig, vocab_size: int, batch: TrainBatch) -> torch.Tensor:
    """Run a teacher, and return hidden states, top k or log-probs, by the configured kind of distillation."""
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
