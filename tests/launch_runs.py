# SPDX-License-Identifier: Apache-2.0
"""The main program in processes of its own on the task of sixteen sums: started by a launcher, or forked.

A launcher's ranks import everything first, a dozen CPU seconds each; forks of a test process have it.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed import TCPStore

from distributed import find_free_port
from megatron_rl.config.fields import dump_yaml
from megatron_rl.run.loading import load_config
from rl_runs import leave_out_curves, overrides_for

ROOT = Path(__file__).resolve().parents[1]
STEPS = 3


def write_recipe(task: Path, path: Path, *extra: str) -> Path:
    """A recipe of TP inside a node and PP across two, each rank an engine: every weight moves, near and far."""
    overrides = overrides_for(
        task,
        path.parent / "never",
        "actor.tensor_model_parallel_size=2",
        "actor.pipeline_model_parallel_size=2",
        "actor.sequence_parallel=true",
        f"trainer.total_steps={STEPS}",
        "data.validation_files=[]",
        "trainer.save_freq=null",
        "trainer.collective_timeout=300",
        *extra,
    )
    path.write_text(dump_yaml(load_config(None, overrides).config))
    return path


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a launch script: this interpreter's tools, and no variables of an outer launcher."""
    foreign = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "SLURM", "GROUP_", "ROLE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return clean | {"PYTHON_BIN": str(Path(sys.executable).parent), "OMP_NUM_THREADS": "1"} | more


def run(command: list[str], *, timeout: float = 400, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a launch command from the root of the repository to its end."""
    return subprocess.run(command, cwd=ROOT, env=environment(**more), capture_output=True, text=True, timeout=timeout)


def fork_ranks(
    program: Callable[[], int], world_size: int, directory: Path, *, timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    """Run a program on forks of this process that end like ranks of torchrun: all, soon after one has failed.

    Args:
        program: runs one rank; returns its exit status.
        directory: for files of their output.
        timeout: seconds until all are killed.

    Returns:
        The first status that is not 0, and the output of all ranks, at its end the statuses as torchrun prints them.
    """
    streams, port = [directory / "stdout", directory / "stderr"], find_free_port()
    context = get_context("fork")
    ranks = [
        context.Process(target=_be_rank, args=(program, rank, world_size, port, streams)) for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # outlives the ranks, as torchrun's
    deadline, failed = time.monotonic() + timeout, 0
    while any(rank.exitcode is None for rank in ranks):
        now = time.monotonic()
        if not failed and any(rank.exitcode for rank in ranks):
            failed, deadline = next(rank.exitcode for rank in ranks if rank.exitcode), min(deadline, now + 30)
            for rank in ranks:
                if rank.exitcode is None and rank.pid is not None:
                    os.kill(rank.pid, signal.SIGTERM)
        if now > deadline:
            for rank in ranks:
                rank.kill()
        time.sleep(0.02)
    del store
    failed = failed or next((rank.exitcode for rank in ranks if rank.exitcode), 0)
    stdout, stderr = (stream.read_text() for stream in streams)
    codes = "".join(f"  exitcode  : {rank.exitcode}\n" for rank in ranks if rank.exitcode)
    return subprocess.CompletedProcess([], failed, stdout, stderr + codes)


def fork_program(words: list[str], directory: Path, place: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run "python script arguments" in a fork of this process, without a launcher.

    Args:
        words: of the command.
        directory: for files of its output.
        place: working directory.
    """
    assert words[0] == "python"

    def program() -> int:
        os.chdir(place)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
            del os.environ[name]
        return run_script(Path(words[1]), *words[2:])

    return fork_ranks(program, 1, directory)


def run_script(script: Path, *arguments: object) -> int:
    """Be the interpreter of a script: for `fork_ranks`."""
    sys.argv = [str(script), *map(str, arguments)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _be_rank(program: Callable[[], int], rank: int, world_size: int, port: int, streams: list[Path]) -> NoReturn:
    code = 1
    try:
        for number, stream in enumerate(streams, start=1):
            os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
        torch.set_num_threads(1)  # OpenMP's worker threads do not survive the fork
        leave_out_curves()
        code = program()
    except BaseException:  # as an interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without the exit handlers of the parent's libraries


def assert_succeeded(result: subprocess.CompletedProcess[str]) -> None:
    """Assert status 0; the message contains the end of the output."""
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
