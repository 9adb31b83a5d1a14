# SPDX-License-Identifier: Apache-2.0
"""Inputs from which a role is built."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.algorithm import DistillationConfig
from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import ModelConfig
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.weights.families import ModelShape


@dataclass(frozen=True)
class LearnedTeacher:
    """A teacher whose distributions, not only its sampled log-probs, the policy learns.

    Attributes:
        path: checkpoint of the teacher; with kind full, the student loads its output layer from there.
    """

    config: DistillationConfig
    path: str
    shape: ModelShape


@dataclass(frozen=True, kw_only=True)
class RoleSetup:
    """Inputs of a role's construction, equal on all of its ranks except for `groups`.

    Attributes:
        model: dtype and implementation of the layers.
        shape: with a score head (`load_model_shape(path, head="score")`) unless `spec.head` is "logprob".
        seed: seed of megatron-core's RNG streams.
        temperature: divisor of a language model's logits.
        total_optimizer_steps: length of the learning-rate schedule.
        teacher: `None` unless the actor learns from a teacher's distributions.
    """

    spec: RoleSpec
    model: ModelConfig
    shape: ModelShape
    groups: ParallelGroups
    seed: int
    temperature: float = 1.0
    total_optimizer_steps: int = 0
    teacher: LearnedTeacher | None = None
