# SPDX-License-Identifier: Apache-2.0
"""Turn an exception on any rank into one message of the job.

The traceback goes to the rank's log, the message (`failures.py`) to the console. If all ranks have raised, the
exception propagates, marked as reported; a rank that fails alone ends its process, and the watchdogs end the rest.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_rl.config.schema import RunConfig
from megatron_rl.observability.progress import PhaseTimers, append_to_log, show_error
from megatron_rl.types import EXIT_FAILED, Preempted, UserError, mark_reported, reported_code

if TYPE_CHECKING:
    from megatron_rl.observability.failures import Position
    from megatron_rl.run.watchdog import Watchdog

_PORT = 5678  # that IDEs propose
_LOCALHOST = "127.0.0.1"
_PATIENCE_SECONDS = 7 * 24 * 3600.0


def wait_for_debugger(config: RunConfig, world_size: int) -> RunConfig:
    """Wait on the rank to debug until an IDE attaches; return the config with a longer collective time limit.

    Raises:
        UserError: on every rank alike, without such a rank or without debugpy.
    """
    rank = config.flags.debug_rank
    if rank is None:
        return config
    from megatron_rl.config.flags import check_debug_rank

    check_debug_rank(rank, world_size)
    if int(os.environ.get("RANK", "0")) == rank:
        debugpy = importlib.import_module("debugpy")
        debugpy.configure(subProcess=False)  # an engine's processes would wait for an IDE, too
        _, port = debugpy.listen((_LOCALHOST, _PORT if _is_free(_PORT) else 0))
        sys.stderr.write(
            f"rank {rank} waits for a debugger at {_LOCALHOST}:{port} of {socket.gethostname()}, "
            "and the other ranks wait for it (docs/extending.md#debugging-a-rank)\n"
        )
        sys.stderr.flush()
        debugpy.wait_for_client()
    return config.with_sections({"trainer": {"collective_timeout": _PATIENCE_SECONDS}})


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOCALHOST, port))
        except OSError:
            return False
    return True


_TOGETHER_SECONDS = 3.0  # in which all ranks have come to the same failure, if they do
_LOST_SECONDS = 5.0  # without a heartbeat where a connection is broken: the process is gone


class Guard:
    """Reports failures of one rank to the job, and decides whether the process raises or ends.

    Args:
        watchdog: `None` in a job of one rank.
        release: called by `close` after the watchdog has ended.
    """

    def __init__(
        self, rank: int, timers: PhaseTimers, log_file: Path, watchdog: Watchdog | None, release: Callable[[], None]
    ) -> None:
        self._rank, self._timers, self._log_file = rank, timers, log_file
        self._watchdog, self._release = watchdog, release

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an exception of the block (not `Preempted`); raise it if all ranks have failed, else exit."""
        try:
            yield
        except Preempted:
            raise
        except Exception as error:
            if reported_code(error) is None:
                self._report(error)
            raise

    @contextmanager
    def building(self) -> Iterator[None]:
        """Report an exception of the block, which builds a run, as in `reporting`, and `close` after it."""
        try:
            with self.reporting():
                yield
        except BaseException:
            self.close()
            raise

    def positions(self) -> Sequence[Position | None]:
        """Return the last heartbeat of every rank; empty in a job of one rank."""
        return self._watchdog.positions() if self._watchdog else ()

    def _report(self, error: Exception) -> None:
        from megatron_rl.observability.failures import FindSilent, Scene, explain, is_lost_peer

        watchdog, recent, log_file = self._watchdog, list[str](), self._log_file
        scene = Scene.of(error, self._rank, self._timers.step, log_file)

        def describe(find_silent: FindSilent = tuple) -> str:
            found = explain(error, scene, find_silent)
            return f"{found}\n  where:    {scene}" if found is error else str(found)

        if watchdog is not None:
            from megatron_rl.run.watchdog import describe_collectives

            recent = describe_collectives()
        lines = [*traceback.format_exception(error), *(f"collective: {x}\n" for x in recent)]
        append_to_log(log_file, "".join(lines))
        code = error.exit_code if isinstance(error, UserError) else EXIT_FAILED
        try:
            if watchdog is None:
                show_error(describe(), log_file)
            else:
                board, is_lost = watchdog.board, is_lost_peer(error)
                watchdog.hand_over()
                # A rank posts its report before it leaves: a broken connection without a report means a lost process.
                if not (is_lost and board.is_posted) and board.claim():
                    board.post(describe(lambda: watchdog.find_silent(_LOST_SECONDS)), code)
                seconds = 0.0 if is_lost else _TOGETHER_SECONDS
                are_together = board.have_all_come(watchdog.watched.world_size, seconds)
                report = board.conclude()
                if not are_together:
                    watchdog.leave(report.code if report else code)
        except dist.DistError as caught:  # the store's host, a rank or torchrun's agent, is gone
            append_to_log(log_file, f"the job's store does not answer: {caught}")
            show_error(describe(), log_file)
        mark_reported(error, code)

    def close(self) -> None:
        """End the watchdog, restore signal handlers and release the lock."""
        if self._watchdog is not None:
            self._watchdog.close()
        self._release()
