# SPDX-License-Identifier: Apache-2.0
"""Worker processes that run rules and user functions in parallel to the rank.

A worker is a new interpreter (`child.py`) that imports only this file, the rules and the user's file; module state
persists between calls. One thread per worker sends it one rollout at a time.

Invariants: each rollout gets a score or a UserError that names it, even if the function hangs (the worker is killed
with its children) or the worker dies. No worker outlives its rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from megatron_rl.rewards.child import ChildProcess
from megatron_rl.rewards.scoring import Score, compute_score, describe_rollout, load_reward_function
from megatron_rl.types import Rollout, UserError

_START_SECONDS = 120.0  # includes imports of the user's file
_GRACE_SECONDS = 1.0


class WorkerPool:
    """The worker processes of one rank, started on demand.

    Args:
        functions: (name, setting) pairs for `load_reward_function`.
        timeout_seconds: limit for one rollout.
        secrets: see `ChildProcess`.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, str]],
        num_workers: int,
        timeout_seconds: float,
        *,
        answer: str = "marked",
        secrets: Collection[str] = (),
    ) -> None:
        self._functions, self._timeout_seconds = list(functions), timeout_seconds
        self._answer, self._secrets = answer, secrets
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward-worker")
        self._of_this_thread = threading.local()
        self._workers: set[ChildProcess] = set()
        self._lock, self._is_closed = threading.Lock(), False

    def submit(self, function: int, rollout: Rollout, step: int = 0) -> Future[Score]:
        """Score a rollout with the function at this index; the future raises UserError on failure."""
        return self._threads.submit(self._score, function, rollout, step)

    def close(self) -> None:
        """Drop queued rollouts and end the workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.dismiss()
        deadline = time.monotonic() + _GRACE_SECONDS
        for worker in workers:
            worker.end(deadline - time.monotonic())
        self._threads.shutdown(wait=True)

    def _score(self, function: int, rollout: Rollout, step: int) -> Score:
        worker = getattr(self._of_this_thread, "worker", None) or self._start_worker()
        self._of_this_thread.worker = worker
        try:
            reply = worker.ask((function, rollout, step), self._timeout_seconds)
        except (EOFError, OSError) as error:
            self._of_this_thread.worker = None  # the thread's next rollout starts a new worker
            is_late = isinstance(error, TimeoutError)
            end = _describe_end(self._end(worker, 0.0 if is_late else _GRACE_SECONDS))
            name, setting = self._functions[function]
            reply = UserError(
                "the reward function "
                f"{f'was not done after {self._timeout_seconds:g} s' if is_late else f'ended its process ({end})'}\n"
                f"{describe_rollout(rollout)}",
                source=f"{setting} = {name}",
                expected=f"a score within reward.timeout_seconds = {self._timeout_seconds:g}",
                hint="make the function accept every text that a policy can write, and bound its waiting",
            )
        if isinstance(reply, UserError):
            raise reply
        return reply

    def _start_worker(self) -> ChildProcess:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the pool is closed")
            worker = ChildProcess("megatron_rl.rewards.workers", self._secrets)
            self._workers.add(worker)
        try:
            error = worker.ask((self._functions, self._answer), _START_SECONDS)
        except (EOFError, OSError) as caught:
            code = self._end(worker, _GRACE_SECONDS)
            error = UserError(
                f"a worker process did not start: {type(caught).__name__}, {_describe_end(code)}",
                source=", ".join(setting for _, setting in self._functions),
                expected=f"a file that is imported within {_START_SECONDS:g} s",
                hint="look at its messages on stderr; reward.workers=0 scores in the rank itself",
            )
        if error is not None:
            raise error
        return worker

    def _end(self, worker: ChildProcess, grace: float) -> int:
        code = worker.end(grace)
        with self._lock:
            self._workers.discard(worker)
        return code


def _describe_end(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def serve(connection: Connection) -> None:
    """Run a worker: load the functions in the first message, then score rollouts."""
    faulthandler.enable()
    os.set_inheritable(connection.fileno(), False)  # processes started by the user's function must not hold it open
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, messages), daemon=True).start()
    try:
        named, answer = messages.get()
        functions = [load_reward_function(name, setting, answer) for name, setting in named]
    except UserError as error:
        connection.send(error)
        return
    connection.send(None)
    for function, rollout, step in iter(messages.get, None):
        try:
            reply: Score | UserError = compute_score(functions[function], rollout, step)
        except UserError as error:
            reply = error
        connection.send(reply)


def _receive(connection: Connection, messages: queue.SimpleQueue[Any]) -> None:
    """Queue the rank's messages; when the rank is gone, kill this worker and its children."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            messages.put(connection.recv())
    messages.put(None)
    time.sleep(_GRACE_SECONDS)
    os.kill(0, signal.SIGKILL)  # the worker's own session


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
