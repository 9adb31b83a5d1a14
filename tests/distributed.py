# SPDX-License-Identifier: Apache-2.0
"""Run a function on several ranks of a gloo world, from inside a test.

    def _sum_of_ranks(rank, world_size):
        total = torch.tensor(rank)
        dist.all_reduce(total)
        return total

    assert run_ranks(_sum_of_ranks, 4) == [6, 6, 6, 6]

The ranks are forks of the test process: they inherit its imports (torch, megatron, vLLM: seconds each), closures work,
and four ranks start in a fraction of a second. The price is that the parent must be fit to be forked:
no process group of its own, no CUDA context, no busy threads.

Invariants (asserted in test_distributed.py): results come back by rank and by value; a rank that raises, dies or hangs
ends the call with an AssertionError with every such rank's own traceback, the first failure first; no child survives.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

POLL_SECONDS = 0.01
# After the first failure the other ranks get this long to fail by themselves: a symmetric error then shows them all.
GRACE_SECONDS = 1.0
STACK_SIGNAL = signal.SIGUSR1
_RANDOM = random.SystemRandom()  # a test may have seeded the other


@dataclass(frozen=True)
class _Files:
    """Files through which a rank returns its result."""

    directory: Path
    rank: int

    @property
    def result(self) -> Path:
        return self.directory / f"result-{self.rank}"

    @property
    def error(self) -> Path:
        return self.directory / f"error-{self.rank}"

    @property
    def stacks(self) -> Path:
        return self.directory / f"stacks-{self.rank}"

    def write(self, path: Path, content: bytes) -> None:
        """Write so that the parent sees the whole file or none."""
        partial = path.with_suffix(".partial")
        partial.write_bytes(content)
        partial.rename(path)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 180.0,
    dying: tuple[int, ...] = (),
    grace: float = GRACE_SECONDS,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank of a new gloo world and return the results by rank.

    Each rank has the default process group, the environment variables of ``torchrun`` (RANK, LOCAL_RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), one thread, and torch's CPU generator seeded with 0.

    Args:
        fn: any callable; it is forked, not pickled.
        world_size: number of ranks.
        *args: arguments of ``fn``.
        timeout: seconds for the whole call, including the start.
        dying: ranks that are meant to die; the others continue, and the result of these is None.
        grace: seconds that the other ranks have to fail by themselves after the first one.

    Returns:
        Results of ``fn`` on rank 0, 1, ...; must be picklable. Tensors come back as CPU copies.

    Raises:
        AssertionError: a rank raised, died from a signal, exited, or was not done in time; the message holds the
            tracebacks of all ranks that failed (for a hang: of all ranks).
    """
    if dist.is_initialized():
        raise AssertionError("run_ranks: the parent has a process group; destroy it first, forks cannot share it")
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        files = [_Files(Path(name), rank) for rank in range(world_size)]
        release_read, release_write = os.pipe()
        port = find_free_port()
        context = get_context("fork")
        children = []
        gc.freeze()  # a collection in a rank would touch, and so copy, every page of the parent's imports
        try:
            for rank in range(world_size):
                target_args = (fn, rank, world_size, args, files[rank], port, timeout, (release_read, release_write))
                children.append(context.Process(target=_run_child, args=target_args, name=f"rank{rank}"))
                children[-1].start()
            gc.unfreeze()
            survivors = [rank for rank in range(world_size) if rank not in dying]
            _wait_for_results([children[r] for r in survivors], [files[r] for r in survivors], timeout, grace)
            return [None if rank in dying else _load(files[rank].result) for rank in range(world_size)]
        finally:
            os.close(release_read)
            os.close(release_write)
            _end(children)


def _run_child(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    files: _Files,
    port: int,
    timeout: float,
    release: tuple[int, int],
) -> NoReturn:
    """Be one rank: never returns and never runs the exit handlers that the parent's libraries have registered."""
    exit_code = 1
    try:
        os.close(release[1])
        _prepare_child(rank, world_size, files, port)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{files.directory}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout + 60),  # the parent's timeout comes first: it shows all ranks
        )
        files.write(files.result, _dump(fn(rank, world_size, *args)))
        exit_code = 0
    except BaseException:  # pytest.skip and SystemExit as well: a rank has nobody to raise to
        files.write(files.error, pickle.dumps((time.monotonic(), traceback.format_exc())))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Stay until the parent has all it wants (it closes its end of the pipe) or kills us: a rank that leaves
        # closes its connections, and the others would fail for that reason instead of their own.
        os.read(release[0], 1)
        os._exit(exit_code)


def _prepare_child(rank: int, world_size: int, files: _Files, port: int) -> None:
    stacks = files.stacks.open("w")
    faulthandler.enable(file=stacks)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True, chain=False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.unfreeze = lambda: None  # vLLM calls it when an engine is closed
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever this host's name resolves to
    torch.set_num_threads(1)  # also required: OpenMP's worker threads do not survive the fork
    torch.manual_seed(0)


def _wait_for_results(children: list[BaseProcess], files: list[_Files], timeout: float, grace: float) -> None:
    deadline = time.monotonic() + timeout
    while not all(entry.result.exists() for entry in files):
        if any(_has_failed(child, entry) for child, entry in zip(children, files, strict=True)):
            _wait_for_more_failures(children, files, grace)
            raise AssertionError(_describe_failures(children, files))
        if time.monotonic() > deadline:
            raise AssertionError(_describe_hang(children, files, timeout))
        time.sleep(POLL_SECONDS)


def _has_failed(child: BaseProcess, entry: _Files) -> bool:
    if entry.error.exists():
        return True
    # In this order: a rank that is gone has written its result before, if it ever will.
    return child.exitcode is not None and not entry.result.exists()


def _wait_for_more_failures(children: list[BaseProcess], files: list[_Files], grace: float) -> None:
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        ranks = zip(children, files, strict=True)
        if all(_has_failed(child, entry) or entry.result.exists() for child, entry in ranks):
            return
        time.sleep(POLL_SECONDS)


def _describe_failures(children: list[BaseProcess], files: list[_Files]) -> str:
    reports: list[tuple[float, str]] = []
    for child, entry in zip(children, files, strict=True):
        if entry.error.exists():
            when, text = pickle.loads(entry.error.read_bytes())
            reports.append((when, f"rank {entry.rank} raised:\n{text}"))
        elif child.exitcode is not None and not entry.result.exists():
            how = f"was killed by {signal.Signals(-child.exitcode).name}" if child.exitcode < 0 else "exited"
            text = f"rank {entry.rank} {how} (exit code {child.exitcode}) without a result\n{_read_stacks(entry)}"
            reports.append((0.0, text))  # the others only see a lost connection
    reports.sort(key=lambda report: report[0])
    header = f"{len(reports)} of {len(children)} ranks failed, the first of them first"
    return "\n\n".join([header, *(text for _, text in reports)])


def _describe_hang(children: list[BaseProcess], files: list[_Files], timeout: float) -> str:
    for child in children:
        if child.is_alive():
            os.kill(child.pid, STACK_SIGNAL)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and not all(_read_stacks(entry).endswith("\n") for entry in files):
        time.sleep(POLL_SECONDS)
    time.sleep(10 * POLL_SECONDS)  # a traceback is written line by line
    reports = [f"not all of {len(children)} ranks were done after {timeout:g} s"]
    for entry in files:
        state = "is done and waits" if entry.result.exists() else "is not done"
        reports.append(f"rank {entry.rank} {state}; its stacks:\n{_read_stacks(entry)}")
    return "\n\n".join(reports)


def _read_stacks(entry: _Files) -> str:
    return entry.stacks.read_text() if entry.stacks.exists() else ""


def _end(children: list[BaseProcess]) -> None:
    """Let finished ranks leave by themselves for a moment, kill the others, reap all."""
    deadline = time.monotonic() + GRACE_SECONDS
    for child in children:
        if child.pid is None:
            continue
        if child.exitcode is None and sys.exc_info()[0] is None:
            child.join(max(0.0, deadline - time.monotonic()))
        if child.exitcode is None:
            child.kill()
        child.join()
        child.close()


def _dump(value: Any) -> bytes:
    # torch.save stores tensors by value; torch.multiprocessing's pickler would pass file descriptors of shared memory
    # that die with the child.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)  # written by our own fork a moment ago


def find_free_port() -> int:
    """Return a port that is free now, below the kernel's range for connections, which would take it at any moment."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = _RANDOM.randrange(low - 10_000, low) if low > 20_000 else 0
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
