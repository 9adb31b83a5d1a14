# SPDX-License-Identifier: Apache-2.0
"""What a role is built from."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.algorithm import DistillationConfig
from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import ModelConfig
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.weights.families import ModelShape


@dataclass(frozen=True)
class LearnedTeacher:
    """What a policy that learns from distributions must know before it is built.

    Attributes:
        config: kind full or top_k.
        path, shape: of the teacher, for kind full.
    """

    config: DistillationConfig
    path: str
    shape: ModelShape


@dataclass(frozen=True, kw_only=True)
class RoleSetup:
    """What a role is built from; the same on all of its ranks, but for `groups`.

    Attributes:
        spec: weights, layout and head, and whether it is trained.
        model: dtype and implementation of the layers.
        shape: the architecture; with a score head (`load_model_shape(path, head="score")`) unless `spec.head` is
            "logprob".
        groups: process groups of its layout.
        seed: of megatron-core's RNG streams.
        temperature: that the logits of a language model are divided by.
        total_optimizer_steps: length of the learning-rate schedule.
        teacher: whose distributions the actor learns from; None: at most from log-probs.
    """

    spec: RoleSpec
    model: ModelConfig
    shape: ModelShape
    groups: ParallelGroups
    seed: int
    temperature: float = 1.0
    total_optimizer_steps: int = 0
    teacher: LearnedTeacher | None = None
