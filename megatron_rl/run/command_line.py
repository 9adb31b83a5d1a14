# SPDX-License-Identifier: Apache-2.0
"""The command line of all training entry points.

    torchrun --nproc-per-node N launch/<entry>.py RECIPE.yaml [section.key=value ...] [--dry-run [--json]]

A dry run refuses the inputs that the start refuses, but does not check devices and the run directory; it imports no
engine, and torch only for the headers of weights, if installed. A failure is printed once in the job; every rank exits
with the status of its cause (docs/checkpoints.md).
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO

from megatron_rl.config.checked import Mistakes
from megatron_rl.config.rendering import config_to_dict, dump_yaml
from megatron_rl.config.schema import RunConfig
from megatron_rl.run.loading import LoadedConfig, load_config, read_settings
from megatron_rl.types import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
    Preempted,
    UserError,
    reported_code,
)

if TYPE_CHECKING:
    from megatron_rl.config.batch_plan import BatchPlan
    from megatron_rl.config.sft_plan import SftPlan
    from megatron_rl.run.inputs import RlInputs, SftInputs

    Plan = BatchPlan | SftPlan

_USAGE = """usage: torchrun --nproc-per-node N launch/{name}.py RECIPE.yaml [section.key=value ...]

{description}

  RECIPE.yaml          nested settings; see launch/recipes/
  section.key=value    override one setting; also --section.key value, and Megatron's spelling of a
                       leaf: --pipeline-model-parallel-size 2
  --dry-run            print the resolved config and the batch plan, read and check all that the start reads
                       (model, tokenizer, data, rewards, plugins), and exit: 0 if the run would start, else 2
  --json               with --dry-run: as one JSON object
  --world-size N       with --dry-run outside of torchrun: number of ranks to plan for (default: those that
                       a verl recipe asks for, else 1)
  --gpu-memory-gib G   with --dry-run: refuse what does not fit into GPUs of G GiB, with what would
  --gpus-per-node N    with --gpu-memory-gib (default: 8, or all ranks where there are fewer)
  --help               this text with every setting; with a recipe or algorithm.plugins, also its plugins' own
"""

_PATIENCE_SECONDS = 20.0


def run_command(
    argv: Sequence[str],
    *,
    name: str,
    description: str,
    build_plan: Callable[[RunConfig, int], Plan],
    read_inputs: Callable[[RunConfig, int], RlInputs | SftInputs],
    run: Callable[[LoadedConfig, Path | None], None],
    check_memory: Callable[[RunConfig, Path | None, int, float, int | None], tuple[RunConfig, list[str], str]]
    | None = None,
) -> int:
    """Parse the arguments, plan or run, and return the exit status: 0, or that of `end_program`.

    Args:
        argv: without the program's name.
        name, description: for the usage text.
        build_plan: batch arithmetic from config and world size, for the dry run.
        read_inputs: reads and checks the inputs of the start, for the dry run.
        run: trains; called with the loaded config and the recipe's path.
        check_memory: for the dry run, chooses the layout if `layout.mode` is auto and refuses a run that does not fit:
            from config, recipe, world size, GiB of a GPU and GPUs per node it returns the config, notes, and a line on
            memory; `None` without a planner.
    """
    if "--help" in argv or "-h" in argv:
        _import_plugins(argv)
        from megatron_rl.compat.aliases import format_help, format_names

        usage = _USAGE.format(name=name, description=description)
        _say("\n".join((usage, format_help(), format_names())))
        return 0
    try:
        flags, recipe, arguments = _split(argv)
        loaded = load_config(recipe, arguments)
        _say_notes(loaded.notes)
        if "--dry-run" in flags:
            world_size = _world_size(flags, loaded.num_ranks)
            memory, problem = None, None
            if check_memory is not None and "--gpu-memory-gib" in flags:
                config, chosen, memory = check_memory(loaded.config, recipe, world_size, *_gpus(flags))
                loaded = replace(loaded, config=config)
                _say_notes(chosen)
            elif loaded.config.layout.mode == "auto" and check_memory is not None:
                raise _refuse_auto()
            plan = build_plan(loaded.config, world_size)
            try:
                inputs = read_inputs(loaded.config, world_size)
                plan = inputs.plan
                _say_notes(inputs.notes)
            except UserError as error:  # the plan from the config alone is shown even if files are missing
                problem = error
            _say(_render_plan(loaded, plan, memory, "--json" in flags))
            if problem is not None:
                raise problem
            return 0
        run(loaded, recipe)
    except (Exception, KeyboardInterrupt) as error:
        return end_program(error)
    return 0


def _refuse_auto() -> UserError:
    return UserError(
        "layout.mode = 'auto' in a dry run without the memory of a GPU",
        source="layout.mode",
        expected="--gpu-memory-gib G",
        hint="for example --world-size 8 --gpu-memory-gib 80",
    )


def end_program(error: BaseException) -> int:
    """Print the error that ended this rank once per job, unless it was reported; return the exit status.

    Errors before a run is open (`run/guard.py`) are usually raised on every rank. A user error is printed without a
    traceback, any other with it, since there is no log yet.
    """
    code = reported_code(error)
    if code is not None:
        return code
    if isinstance(error, Preempted):
        _say(f"stopped: {error}", sys.stderr)
        return EXIT_PREEMPTED
    if isinstance(error, KeyboardInterrupt):
        _say("stopped: interrupted from the keyboard", sys.stderr)
        return EXIT_INTERRUPTED
    is_user_error = isinstance(error, UserError)
    text = str(error) if is_user_error else "".join(["\n", *traceback.format_exception(error)]).rstrip()
    _say(f"error: {text}", sys.stderr)
    if not _is_first():
        # torchrun ends all ranks when one has ended, so rank 0 must have printed by then. If rank 0 found no error
        # (a file is missing on this node only), this rank survives the wait and prints by itself.
        time.sleep(_PATIENCE_SECONDS)
        _say(f"error on rank {os.environ['RANK']}: {text}", sys.stderr, on_all=True)
    return EXIT_USER_ERROR if is_user_error else EXIT_FAILED


def leave(code: int) -> NoReturn:
    """End this process like `sys.exit`, but without finalizing a rank's interpreter.

    Finalization takes seconds, too long for `end_program` on other ranks, and may abort with status -6 if a thread of
    torch's process groups releases a tensor meanwhile.
    """
    distributed = sys.modules.get("torch.distributed")
    if "RANK" not in os.environ and (distributed is None or not distributed.is_initialized()):
        sys.exit(code)
    vars(threading)["_shutdown"]()  # as the interpreter does: waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_program_on_errors() -> None:
    """Install an exception hook that ends a script, not an interactive session, through `end_program`."""
    if hasattr(sys, "ps1") or sys.flags.interactive or getattr(sys.excepthook, "is_ours", False):
        return
    before = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if reported_code(error) is None and not isinstance(error, UserError | Preempted):
            before(kind, error, trace)
            return
        leave(end_program(error))

    end.is_ours = True
    sys.excepthook = end


def _import_plugins(argv: Sequence[str]) -> None:
    """Import the plugins of a command line to list their settings; print its mistakes as a note."""
    try:
        _, recipe, arguments = _split([argument for argument in argv if argument not in ("--help", "-h")])
        mistakes = Mistakes()
        read_settings(recipe, arguments, mistakes)
        mistakes.raise_all()
    except UserError as error:
        _say(f"note: settings of plugins may be missing: {error}", sys.stderr)


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], Path | None, list[str]]:
    flags: dict[str, str] = {}
    argv = list(arguments)
    for flag in ("--dry-run", "--json"):
        if flag in argv:
            argv.remove(flag)
            flags[flag] = "true"
    for flag in ("--world-size", "--gpu-memory-gib", "--gpus-per-node"):
        for index, argument in enumerate(argv):
            name, separator, value = argument.partition("=")
            if name == flag:
                taken = 1 if separator else 2
                flags[name] = value if separator else "".join(argv[index + 1 : index + 2])
                del argv[index : index + taken]
                break
    if flags and "--dry-run" not in flags:
        flag = next(iter(flags))
        raise UserError(
            f"{flag} without --dry-run",
            source="command line",
            expected=f"{flag} for a plan only; a run has the ranks that torchrun starts, on the GPUs of this machine",
            hint="add --dry-run, or start torchrun --nproc-per-node N and leave it out",
        )
    has_recipe = bool(argv) and not argv[0].startswith("-") and "=" not in argv[0]
    recipe = Path(argv.pop(0)) if has_recipe else None
    return flags, recipe, argv


def _world_size(flags: dict[str, str], asked: int | None) -> int:
    """Return --world-size, else torchrun's world size, else the ranks of a verl recipe, else 1."""
    text = flags.get("--world-size") or os.environ.get("WORLD_SIZE") or str(asked or 1)
    if not text.isdigit() or int(text) < 1:
        raise UserError(
            f"--world-size {text!r}",
            source="command line",
            expected="a number of ranks, 1 or more",
            hint="for example --world-size 8",
        )
    return int(text)


def _gpus(flags: dict[str, str]) -> tuple[float, int | None]:
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


def _render_plan(loaded: LoadedConfig, plan: Plan, memory: str | None, as_json: bool) -> str:
    if as_json:
        return json.dumps(
            {
                "config": config_to_dict(loaded.config),
                "batch_plan": asdict(plan),
                "memory": memory,
                "notes": loaded.notes,
            },
            indent=2,
        )
    lines = [dump_yaml(loaded.config), "batch plan:", *(f"  {line}" for line in plan.formulas())]
    return "\n".join([*lines, *([memory] if memory else [])])


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say_notes(notes: Sequence[str]) -> None:
    for note in notes:
        _say(f"note: {note}", sys.stderr)


def _say(text: str, stream: TextIO | None = None, on_all: bool = False) -> None:
    if on_all or _is_first():
        print(text, file=stream, flush=True)
