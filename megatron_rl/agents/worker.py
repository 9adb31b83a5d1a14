# SPDX-License-Identifier: Apache-2.0
"""Process from which episodes are forked: `python -m megatron_rl.agents.worker FILE_DESCRIPTOR`.

It imports the environment and loads the tokenizer, has one thread, and runs no other user code. Hangs and crashes stay
within an episode, which is killed with its descendants. The started process forks the worker and stays to clean up
after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from numpy import random as numpy_random  # numpy imports it lazily, which would happen in each episode

from megatron_rl.agents.episode import Answer, Opening, Setup, find_environments, play_environment, read_tokenizer
from megatron_rl.agents.program import find_program, run_program
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.agents.sandbox import Pool, Sandbox

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)

# Plays an episode with (connection to the rank, setup, tokenizer, opening).
Player = Callable[[Connection, Setup, Tokenizer, Opening], None]


def serve(connection: Connection) -> None:
    """Fork a process per episode, and kill it on request, until the rank is gone or sends `None`."""
    os.set_inheritable(connection.fileno(), False)
    _control_process(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        setup: Setup = connection.recv()
        player, (setup, tokenizer) = _find_player(setup), read_tokenizer(setup)
        pool = _find_pool(setup)
    except UserError as error:
        connection.send(error)
        return
    connection.send(None)
    gc.collect()
    gc.freeze()  # avoids copy-on-write of these objects by garbage collection in the episodes
    running: dict[int, Sandbox | None] = {}
    with contextlib.suppress(EOFError, OSError):
        while (message := connection.recv()) is not None:
            if message != "begin":
                _end(message, running, pool)
                continue
            descriptor = recv_handle(connection)
            box = None if pool is None else pool.take()
            pid = os.fork()
            if not pid:
                connection.close()
                for other in (*running.values(), *(pool or ())):
                    if other is not None:
                        other.forget()
                _run(Connection(descriptor), setup, player, tokenizer, box)
            os.close(descriptor)
            running[pid] = box
    for pid in [*running, 0]:
        _end(pid, running)


def fork_worker(descriptor: int) -> None:
    """Fork, and return in the child; the parent waits for the child, kills leftover descendants, and exits.

    Args:
        descriptor: of the connection to the rank; only the child keeps it open.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _control_process(_PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker:
        os.close(descriptor)
        os.waitpid(worker, 0)
        _end(worker, {})
        os._exit(0)


def _find_player(setup: Setup) -> Player:
    if setup.program is not None:
        program = find_program(setup.program)
        return lambda connection, *rest: run_program(connection, program, *rest)
    make_environment = find_environments(setup)

    def play(connection: Connection, setup: Setup, tokenizer: Tokenizer, opening: Opening) -> None:
        episode = play_environment(make_environment, setup, tokenizer, opening)
        connection.send(next(episode))
        while True:
            tokens, _, finish_reason = connection.recv()
            connection.send(episode.send((tokens, finish_reason)))

    return play


def _find_pool(setup: Setup) -> Pool | None:
    if setup.sandbox is None:
        return None
    from megatron_rl.agents.sandbox import Pool

    return Pool(setup.sandbox)


def _run(
    connection: Connection, setup: Setup, player: Player, tokenizer: Tokenizer, sandbox: Sandbox | None
) -> NoReturn:
    try:
        os.setsid()
        _control_process(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _control_process(_PR_SET_CHILD_SUBREAPER, 1)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nowhere, standard)
        connection.send(os.getpid())
        opening: Opening = connection.recv()
        opening = replace(opening, task=replace(opening.task, sandbox=sandbox))
        random.seed(opening.task.seed)
        numpy_random.seed(opening.task.seed)
        player(connection, setup, tokenizer, opening)
    except BaseException:  # environments can raise anything
        with contextlib.suppress(BaseException):
            connection.send(Answer.of_error())
    finally:
        os._exit(0)


def _end(pid: int, running: dict[int, Sandbox | None], pool: Iterable[Sandbox] | None = None) -> None:
    """Take `pid` out of `running`; kill and reap that process with its sandbox, and orphaned descendants.

    Args:
        running: processes of episodes, each with its sandbox.
        pool: sandboxes that stay.
    """
    if pid in running:
        box = running.pop(pid)
        _kill(pid)
        if box is not None:
            box.kill()
            box.forget()
    boxes = [*running.values(), *(pool or ())]
    kept = {*running, *(box.process.pid for box in boxes if box is not None and box.process is not None)}
    # As a subreaper, this process becomes the parent of orphaned descendants.
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(OSError):  # of reading the file
        while orphans := {int(child) for child in children.read_text().split()} - kept:
            for orphan in orphans:
                _kill(orphan)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _control_process(option: int, value: int) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    fork_worker(int(sys.argv[1]))
    serve(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skips exit handlers: libraries imported by the tokenizer print warnings in them
