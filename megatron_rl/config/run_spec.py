# SPDX-License-Identifier: Apache-2.0
"""Which models a run has; `algorithms/resolution.py` is the one place that decides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.schema import LayoutConfig


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """One model of a run.

    Attributes:
        name: "actor", "critic", "reference" or "reward_model".
        path: HF directory of its first weights, or a checkpoint of this package.
        section: section of the config with its layout; that of the reference is the actor's.
        layout: that section.
        head: what is made of its hidden states: log-probs of tokens, values of states, or scores of all positions.
        trainable: whether it has an optimizer, and `layout` is a `TrainedConfig`.
        offload: keep its weights on the host except while it works.
        may_lack: tensors that are zero when the files do not have them.
    """

    name: str
    path: str
    section: str
    layout: LayoutConfig
    head: Literal["logprob", "value", "score"]
    trainable: bool = False
    offload: bool = False
    may_lack: tuple[str, ...] = ()


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
