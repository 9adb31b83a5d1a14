# SPDX-License-Identifier: Apache-2.0
"""The command line that all training entry points share.

    torchrun --nproc-per-node N launch/<entry>.py RECIPE.yaml [section.key=value ...] [--dry-run [--json]]

A dry run resolves the config and the batch plan and imports neither torch nor an engine. A user's
error is printed once (by rank 0), without a traceback, and every rank exits with status 2.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config.loading import LoadedConfig, config_to_dict, dump_yaml, format_help, load_config
from megatron_rl.config.schema import RunConfig
from megatron_rl.types import UserError

_USAGE = """usage: torchrun --nproc-per-node N launch/{name}.py RECIPE.yaml [section.key=value ...]

{description}

  RECIPE.yaml          nested settings; see launch/recipes/
  section.key=value    override one setting; also --section.key value, and Megatron's spelling of a
                       leaf: --tensor-model-parallel-size 2
  --dry-run            print the resolved config and the batch plan, and exit
  --json               with --dry-run: as one JSON object
  --world-size N       with --dry-run outside of torchrun: number of ranks to plan for (default: those that
                       a verl recipe asks for, else 1)
  --help               this text with every setting
"""


class Plan(Protocol):
    """Batch arithmetic of an entry point."""

    def formulas(self) -> list[str]:
        """The derived numbers, one line each."""

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""


def run_command(
    argv: Sequence[str], *, name: str, description: str, build_plan: Callable[[RunConfig, int], Plan],
    run: Callable[[LoadedConfig, Path | None], None],
) -> int:
    """Parse, then plan or run.

    Args:
        argv: arguments without the program's name.
        name: of the entry point, for the usage text.
        description: one sentence on what it does.
        build_plan: batch arithmetic from config and world size, for the dry run.
        run: trains; called with the loaded config and the recipe's path.

    Returns:
        Exit status: 0, or 2 for an error that the user can mend.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    if "--help" in argv or "-h" in argv:
        _say(_USAGE.format(name=name, description=description) + "\n" + format_help(), is_first)
        return 0
    try:
        flags, arguments = _split_flags(list(argv))
        recipe = Path(arguments.pop(0)) if arguments and _is_recipe(arguments[0]) else None
        loaded = load_config(recipe, arguments)
        for note in loaded.notes:
            _say(f"note: {note}", is_first, stream=sys.stderr)
        if "--dry-run" in flags:
            plan = build_plan(loaded.config, _world_size(flags, loaded.num_ranks))
            _say(_render_plan(loaded, plan, "--json" in flags), is_first)
            return 0
        _silence_libraries()
        run(loaded, recipe)
    except UserError as error:
        _say(f"error: {error}", is_first, stream=sys.stderr)
        return 2
    return 0


def _is_recipe(argument: str) -> bool:
    return not argument.startswith("-") and "=" not in argument


def _split_flags(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Take out the flags that are not settings."""
    flags: dict[str, str] = {}
    for flag in ("--dry-run", "--json"):
        if flag in argv:
            argv.remove(flag)
            flags[flag] = "true"
    for index, argument in enumerate(argv):
        name, separator, value = argument.partition("=")
        if name == "--world-size":
            taken = 1 if separator else 2
            flags[name] = value if separator else "".join(argv[index + 1 : index + 2])
            del argv[index : index + taken]
            break
    return flags, argv


def _world_size(flags: dict[str, str], asked: int | None) -> int:
    """From --world-size, else from torchrun's environment, else what a verl recipe asks for, else 1."""
    text = flags.get("--world-size") or os.environ.get("WORLD_SIZE") or str(asked or 1)
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"--world-size {text!r}", source="command line", expected="a number of ranks, 1 or more",
                        hint="for example --world-size 8")
    return int(text)


def _render_plan(loaded: LoadedConfig, plan: Plan, as_json: bool) -> str:
    if as_json:
        return json.dumps({"config": config_to_dict(loaded.config), "batch_plan": plan.to_dict(),
                           "notes": loaded.notes}, indent=2)
    return "\n".join([dump_yaml(loaded.config), "batch plan:", *(f"  {line}" for line in plan.formulas())])


def _silence_libraries() -> None:
    """Their warnings at import and in the first step concern their developers; ours are logged."""
    for module in ("megatron", "torch", "transformers", "vllm", "apex"):
        warnings.filterwarnings("ignore", module=module)


def _say(text: str, is_first: bool, stream: object = None) -> None:
    if is_first:
        stream = stream or sys.stdout
        stream.write(text + "\n")
        stream.flush()
