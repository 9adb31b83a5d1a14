# SPDX-License-Identifier: Apache-2.0
"""What must hold before a run is built: its inputs are right, it fits into memory, its steps can be taken here."""

from __future__ import annotations

from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.admission import check_fits, find_cluster
from megatron_rl.roles.build import launched_sizes
from megatron_rl.roles.inputs import RlInputs, read_rl_inputs
from megatron_rl.roles.parts import Parts
from megatron_rl.roles.resolve import resolve
from megatron_rl.training.step import check_step_mode


def read_and_check(config: RunConfig, parts: Parts) -> RlInputs:
    """Read the inputs of a run for the ranks that were launched, and check all that can be checked of them.

    Args:
        config: after `parts.enter`.
        parts: that are given as objects.

    Raises:
        UserError: bad input, on every rank alike.
    """
    world_size, ranks_per_node = launched_sizes()
    cluster = find_cluster(world_size, ranks_per_node)
    if cluster is not None and config.trainer.check_memory:
        check_fits(config, resolve(config), cluster)
    inputs = read_rl_inputs(config, world_size, parts)
    for role in inputs.spec.trained:
        check_step_mode(role.training, role.section)
    return inputs
