# SPDX-License-Identifier: Apache-2.0
"""The command line of all training entry points.

    torchrun --nproc-per-node N launch/<entry>.py RECIPE.yaml [section.key=value ...] [--dry-run [--json]]

A dry run (`preview.py`) refuses the inputs that the start refuses, but does not check devices and the run
directory. A failure is printed once in the job; every rank exits with the status of its cause (docs/checkpoints.md).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO

from megatron_rl import __version__
from megatron_rl.config.schema import RunConfig
from megatron_rl.run.loading import LoadedConfig, load_config
from megatron_rl.types import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    Preempted,
    UserError,
    reported_code,
)

if TYPE_CHECKING:
    from megatron_rl.run.inputs import RlInputs, SftInputs
    from megatron_rl.run.preview import CheckMemory, Plan

_PATIENCE_SECONDS = 20.0


def run_command(
    argv: Sequence[str],
    *,
    name: str,
    description: str,
    build_plan: Callable[[RunConfig, int], Plan],
    read_inputs: Callable[[RunConfig, int], RlInputs | SftInputs],
    run: Callable[[LoadedConfig, Path | None], None],
    check_memory: CheckMemory | None = None,
) -> int:
    """Parse the arguments, plan or run, and return the exit status: 0, or that of `end_program`.

    Args:
        argv: without the program's name.
        name, description: for the usage text.
        build_plan, read_inputs, check_memory: for the dry run, see `plan_run`.
        run: trains; called with the loaded config and the recipe's path.
    """
    loaded = None
    try:
        flags, recipe, arguments = _split(argv)
        if "--help" in flags:
            from megatron_rl.run.preview import format_help_page

            text, notes = format_help_page(flags["--help"], recipe, arguments, name=name, description=description)
            _say_notes(notes)
            _say(text)
            return 0
        loaded = load_config(recipe, arguments)
        _say_notes(loaded.notes)
        if "--dry-run" in flags:
            from megatron_rl.run.preview import plan_run

            text, notes, problem = plan_run(loaded, recipe, flags, build_plan, read_inputs, check_memory)
            _say_notes(notes)
            _say(text)
            if problem is not None:
                raise problem
            return 0
        what = "command line" if recipe is None else recipe
        _say(f"megatron_rl {__version__}: {what}, {os.environ.get('WORLD_SIZE', '1')} rank(s); reading model and data")
        run(loaded, recipe)
    except (Exception, KeyboardInterrupt) as error:
        if loaded is not None and isinstance(error, UserError) and reported_code(error) is None:
            from megatron_rl.config.suggestions import add_places

            error = add_places(error, loaded.sources)
        return end_program(error)
    return 0


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
    text = str(error) if isinstance(error, UserError) else "".join(["\n", *traceback.format_exception(error)]).rstrip()
    _say(f"error: {text}", sys.stderr)
    if not _is_first():
        # torchrun ends all ranks when one has ended, so rank 0 must have printed by then. If rank 0 found no error
        # (a file is missing on this node only), this rank survives the wait and prints by itself.
        time.sleep(_PATIENCE_SECONDS)
        _say(f"error on rank {os.environ['RANK']}: {text}", sys.stderr, on_all=True)
    return error.exit_code if isinstance(error, UserError) else EXIT_FAILED


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


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], Path | None, list[str]]:
    flags: dict[str, str] = {}
    argv = list(arguments)
    for flag in ("--help", "-h"):
        if flag in argv:
            place = argv.index(flag)
            names = [name for name in argv[place + 1 : place + 2] if name[:1] not in ("", "-") and "=" not in name]
            flags["--help"] = names[0] if names and not Path(names[0]).is_file() else ""
            del argv[place : place + 1 + bool(flags["--help"])]
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
    if flags and not flags.keys() & {"--dry-run", "--help"}:
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


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say_notes(notes: Sequence[str]) -> None:
    for note in notes:
        _say(f"note: {note}", sys.stderr)


def _say(text: str, stream: TextIO | None = None, on_all: bool = False) -> None:
    if on_all or _is_first():
        print(text, file=stream, flush=True)
