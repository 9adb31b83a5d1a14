# SPDX-License-Identifier: Apache-2.0
"""Which roles a run has: decided here, asked by the checks, the batch plan, the memory plan and the start."""

from __future__ import annotations

from megatron_rl.algorithms.catalog import find_advantage_estimator
from megatron_rl.config.run_spec import Roles
from megatron_rl.config.schema import RunConfig
from megatron_rl.extension.plugins import load_plugins
from megatron_rl.types import UserError


def resolve(config: RunConfig) -> Roles:
    """Import the user's plugins and decide which models the run builds.

    Raises:
        UserError: a plugin that cannot be imported, an unknown estimator, or one that needs the critic that the
            config switches off.
    """
    load_plugins(config.algorithm.plugins)
    name = config.algorithm.adv_estimator
    estimator, enable = find_advantage_estimator(name), config.critic.enable
    if estimator.needs_values and enable is False:
        raise UserError(
            f"critic.enable = False contradicts algorithm.adv_estimator = {name!r}, which needs the values of a critic",
            source="critic.enable", expected="true, or null",
            hint="remove critic.enable, or set algorithm.adv_estimator=grpo for a run without a critic")
    return Roles(
        critic=estimator.needs_values if enable is None else enable,
        reference=config.algorithm.kl_coef > 0,
        reward_model=config.reward_model.path is not None,
        needs_greedy_baseline=estimator.needs_greedy_baseline, needs_group=estimator.needs_group,
        needs_sum_pi_squared=estimator.needs_sum_pi_squared)
