# SPDX-License-Identifier: Apache-2.0
"""The scored rollouts of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import Rollout, RolloutGroup


@dataclass(frozen=True)
class Collected:
    """The scored rollouts of one step, the same on every rank.

    Attributes:
        groups: one per prompt.
        baselines: reward of the greedy response to each prompt (ReMax), or None.
        metrics: about sampling.
    """

    groups: list[RolloutGroup]
    baselines: np.ndarray | None
    metrics: dict[str, float]

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts; their index in this list is their identity in the batch."""
        return rollouts_of(self.groups)


def rollouts_of(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    """All rollouts of some groups, in order."""
    return [rollout for group in groups for rollout in group.rollouts]


def number_groups(rollouts: Sequence[Rollout]) -> list[int]:
    """A number per rollout that those of one group, which follow each other, have in common."""
    starts = [i == 0 or rollout.prompt is not rollouts[i - 1].prompt for i, rollout in enumerate(rollouts)]
    return np.cumsum(starts).tolist()
