# SPDX-License-Identifier: Apache-2.0
"""Checks before a run is built: its inputs, the memory it needs, the step modes this machine supports."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import RunConfig
from megatron_rl.parallel.collectives import gather_objects, world
from megatron_rl.planning.cluster import find_cluster, find_host
from megatron_rl.run.building import launched_sizes
from megatron_rl.run.command_line import end_program_on_errors
from megatron_rl.run.guard import wait_for_debugger
from megatron_rl.run.inputs import Parts, RlInputs, read_rl_inputs
from megatron_rl.run.loading import load_config
from megatron_rl.run.models import resolve
from megatron_rl.training.step import check_step_mode
from megatron_rl.types import UserError


@dataclass(frozen=True)
class Prepared:
    """A run whose inputs were read and checked.

    Attributes:
        recipe: source of the default directory's name.
        chosen: one line for each automatic layout choice.
    """

    config: RunConfig
    inputs: RlInputs
    recipe: Path | None
    parts: Parts
    chosen: list[str] = field(default_factory=list)

    def agree(self) -> None:
        """Refuse different automatic layouts (UserError on every rank: the nodes have unequal memory); collective."""
        if self.chosen and any(found != self.chosen for found in gather_objects(self.chosen, world())):
            raise UserError(
                "the ranks come to different layouts",
                source="layout.mode",
                expected="nodes with equal memory",
                hint="give the layout: tools/plan.py says which fit the smallest of the nodes",
            )


def prepare(
    model_path: str | Path, config: str | Path | Mapping[str, Any], overrides: Sequence[str], parts: Parts
) -> Prepared:
    """Load and check a config for a user's own program; see `Trainer.from_hf_config`."""
    end_program_on_errors()
    source = config if isinstance(config, Mapping) else Path(config)
    loaded = load_config(source, [*overrides, f"model.path={model_path}"])
    for note in loaded.notes:
        warnings.warn(note)
    return check(loaded.config, source if isinstance(source, Path) else None, parts)


def check(config: RunConfig, recipe: Path | None, parts: Parts) -> Prepared:
    """Read and check inputs (UserError on every rank alike); `trainer.debug_rank` then waits for its debugger."""
    config = parts.enter(config)
    world_size, ranks_per_node = launched_sizes()
    cluster, chosen = find_cluster(world_size, ranks_per_node), []
    if config.layout.mode == "auto":
        if parts.choose_layout is None:
            raise UserError(
                "layout.mode = 'auto' in a program that passes no planner",
                source="layout.mode",
                expected="from_hf_config(..., choose_layout=tools.planning.automatic.choose_layout)",
                hint="or give the layout: tools/plan.py prints the settings of the fastest that fit",
            )
        here = cluster or find_host(world_size, ranks_per_node)
        config, chosen = parts.choose_layout(config, resolve(config), here, recipe)
    if cluster is not None and config.trainer.check_memory:
        from megatron_rl.planning.admission import check_fits

        check_fits(config, resolve(config), cluster)
    inputs = read_rl_inputs(config, world_size, parts)
    for role in inputs.spec.trained:
        check_step_mode(role, inputs.roles[role.name].shape, config.model.dtype)
    config = wait_for_debugger(config)
    return Prepared(config, replace(inputs, notes=[*chosen, *inputs.notes]), recipe, parts, chosen)
