# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators, chosen by name.

Each takes the rewards of one step arranged in groups and returns one advantage per rollout; the same
value is then used for every response token (outcome supervision).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_rl.config.schema import AlgorithmConfig

AdvantageEstimator = Callable[[Sequence[Sequence[float]], AlgorithmConfig], np.ndarray]
_EPSILON = 1e-6


def compute_grpo_advantages(group_rewards: Sequence[Sequence[float]], config: AlgorithmConfig) -> np.ndarray:
    """Group-relative advantages (DeepSeekMath, arXiv 2402.03300, eq. 4.1.2).

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)

    with the unbiased standard deviation of the group. `norm_adv_by_std=False` leaves out the division
    (Dr. GRPO, arXiv 2503.20783). A group of equal rewards gets zeros.

    Args:
        group_rewards: [num_prompts][group_size] rewards; groups may differ in size.
        config: `norm_adv_by_std`.

    Returns:
        [num_rollouts] float64, groups one after the other.
    """
    advantages = []
    for rewards in group_rewards:
        r = np.asarray(rewards, np.float64)
        centred = r - r.mean()
        if config.norm_adv_by_std and len(r) > 1:
            centred = centred / (r.std(ddof=1) + _EPSILON)
        advantages.append(centred)
    return np.concatenate(advantages)


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {"grpo": compute_grpo_advantages}
