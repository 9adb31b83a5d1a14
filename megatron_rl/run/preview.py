# SPDX-License-Identifier: Apache-2.0
"""`--help` and `--dry-run` of an entry point.

A dry run reads all inputs, and prints the settings, the batch plan and whether the run would start. It imports no
engine, and torch only for the headers of weights, if installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config.checked import Mistakes
from megatron_rl.config.fields import config_to_dict, format_yaml, list_fields
from megatron_rl.config.schema import RunConfig
from megatron_rl.run.inputs import localize
from megatron_rl.run.loading import LoadedConfig, read_settings
from megatron_rl.run.models import NOT_HERE
from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.config.batch_plan import BatchPlan
    from megatron_rl.config.sft_plan import SftPlan
    from megatron_rl.run.inputs import RlInputs, SftInputs

    Plan = BatchPlan | SftPlan
    CheckMemory = Callable[[RunConfig, Path | None, int, float, int | None], tuple[RunConfig, list[str], str]]


_USAGE = """usage: torchrun --nproc-per-node N launch/{name}.py RECIPE.yaml [section.key=value ...]

{description}

  RECIPE.yaml          nested settings; see launch/recipes/
  section.key=value    override one setting; also --section.key value, and Megatron's spelling of a
                       leaf: --pipeline-model-parallel-size 2
  --dry-run            print the settings that differ from their defaults and the batch plan, read and check all that
                       the start reads (model, tokenizer, data, rewards, plugins; names of the hub are downloaded),
                       and exit: 0 if the run would start, else 2
  --json               with --dry-run: all settings and the plan as one JSON object
  --world-size N       with --dry-run outside of torchrun: number of ranks to plan for (default: those that
                       a verl recipe asks for, else 1)
  --gpu-memory-gib G   with --dry-run: refuse what does not fit into GPUs of G GiB, with what would
  --gpus-per-node N    with --gpu-memory-gib (default: 8, or all ranks where there are fewer)
  --explain            print at the start how sizes follow from each other and which kernels are in use
  --debug-rank R       rank R waits for a debugger, and the other ranks for up to a week (docs/extending.md)
  --help [SECTION]     this text with every setting, or a section's settings alone (--help rollout); with a recipe or
                       algorithm.plugins, also its plugins' own
"""


def format_help_page(
    topic: str, recipe: Path | None, arguments: Sequence[str], *, name: str, description: str
) -> tuple[str, list[str]]:
    """Return the usage with all settings, or only the settings of `topic` (a section or a setting); and notes.

    The plugins of the recipe and the arguments are imported for their settings; mistakes there are notes.
    """
    from megatron_rl.compat.aliases import format_help, format_names

    notes, mistakes = list[str](), Mistakes()
    try:
        read_settings(recipe, arguments, mistakes)
        mistakes.raise_all()
    except UserError as error:
        notes.append(f"settings of plugins may be missing: {error}")
    if topic:
        return format_help(topic), notes
    return "\n".join((_USAGE.format(name=name, description=description), format_help(), format_names())), notes


def plan_run(
    loaded: LoadedConfig,
    recipe: Path | None,
    flags: Mapping[str, str],
    build_plan: Callable[[RunConfig, int], Plan],
    read_inputs: Callable[[RunConfig, int], RlInputs | SftInputs],
    check_memory: CheckMemory | None,
) -> tuple[str, list[str], UserError | None]:
    """Return the text of a dry run, its notes, and the error in the inputs, if any.

    The plan from the config alone is shown even if files are missing.

    Args:
        flags: of the command line, with their values.
        build_plan: batch arithmetic from config and world size.
        read_inputs: reads and checks the inputs of the start.
        check_memory: chooses the layout if `layout.mode` is auto and refuses a run that does not fit: from config,
            recipe, world size, GiB of a GPU and GPUs per node it returns the config, notes, and a line on memory;
            `None` without a planner.

    Raises:
        UserError: the config contradicts the world size, or the run does not fit into memory.
    """
    world_size, memory, config, notes, problem = _world_size(flags, loaded.num_ranks), None, loaded.config, [], None
    try:
        config, notes = localize(config)
    except UserError as error:
        problem = error
    shown = loaded.config
    if check_memory is not None and "--gpu-memory-gib" in flags:
        config, chosen, memory = check_memory(config, recipe, world_size, *_gpus(flags))
        notes, shown = [*notes, *chosen], config
    elif config.layout.mode != "given" and check_memory is not None:
        raise UserError(
            "layout.mode = 'auto' in a dry run without the memory of a GPU",
            source="layout.mode",
            expected="--gpu-memory-gib G",
            hint="for example --world-size 8 --gpu-memory-gib 80",
        )
    plan = build_plan(config, world_size)
    try:
        if problem is None:
            inputs = read_inputs(config, world_size)
            plan, notes = inputs.plan, notes + inputs.notes
    except UserError as error:
        problem = error
    if "--json" in flags:
        found = {"config": config_to_dict(shown), "batch_plan": asdict(plan), "memory": memory, "notes": loaded.notes}
        return json.dumps(found, indent=2), notes, problem
    lines = [format_yaml(_list_changes(shown)) + "# all other settings have their defaults (--json prints them)"]
    lines += ["batch plan:", *(f"  {line}" for line in plan.formulas()), *([memory] if memory else [])]
    return "\n".join([*lines, _conclude(world_size, notes, problem)]), notes, problem


def _list_changes(config: RunConfig) -> dict[str, Any]:
    """Return the settings that differ from their defaults, as nested sections."""
    fields = list_fields(list(config.teachers))
    defaults = {
        name: vars(info.default) if is_dataclass(info.default) else info.default
        for name, info in fields.items()
        if not info.required
    }

    def find(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
        kept = {}
        for key, value in tree.items():
            name = f"{prefix}{key}"
            found = find(value, f"{name}.") if isinstance(value, dict) and name not in fields else value
            if found != defaults.get(name, {}):
                kept[key] = found
        return kept

    return find(config_to_dict(config), "")


def _conclude(world_size: int, notes: list[str], problem: UserError | None) -> str:
    if problem is not None:
        return "the run would not start: see the error"
    where = " on another machine: see the notes" if any(note.startswith(NOT_HERE) for note in notes) else ""
    return f"the run would start on {world_size} rank(s){where} (not checked: ports, rights to write, trainer.run_dir)"


def _world_size(flags: Mapping[str, str], asked: int | None) -> int:
    """Return --world-size, else torchrun's world size, else the ranks of a verl recipe, else 1."""
    text = flags.get("--world-size") or os.environ.get("WORLD_SIZE") or str(asked or 1)
    if not text.isdigit() or int(text) < 1:
        raise UserError(
            f"--world-size {text!r} is no number of ranks",
            source="command line",
            expected="1 or more",
            hint="for example --world-size 8",
        )
    return int(text)


def _gpus(flags: Mapping[str, str]) -> tuple[float, int | None]:
    try:
        memory, per_node = float(flags["--gpu-memory-gib"]), flags.get("--gpus-per-node")
        return memory, None if per_node is None else int(per_node)
    except ValueError as error:
        raise UserError(
            f"--gpu-memory-gib or --gpus-per-node: {error}",
            source="command line",
            expected="numbers",
            hint="for example --gpu-memory-gib 80 --gpus-per-node 8",
        ) from None
