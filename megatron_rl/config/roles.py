# SPDX-License-Identifier: Apache-2.0
"""Which models a run has; `algorithms/resolution.py` is the one place that decides it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Roles:
    """The models of a run besides the actor, and what its estimator asks of the rollouts.

    Attributes:
        critic, reference, reward_model: whether the run builds one.
        needs_greedy_baseline, needs_group, needs_sum_pi_squared: of the estimator, see `RegisteredEstimator`.
    """

    critic: bool = False
    reference: bool = False
    reward_model: bool = False
    needs_greedy_baseline: bool = False
    needs_group: bool = False
    needs_sum_pi_squared: bool = False

    @property
    def trained(self) -> list[str]:
        """Sections of the models that are trained."""
        return ["actor", *(["critic"] if self.critic else [])]

    @property
    def sections(self) -> list[str]:
        """Sections of the models that have a layout of their own; the reference has the actor's."""
        return [*self.trained, *(["reward_model"] if self.reward_model else [])]
