# SPDX-License-Identifier: Apache-2.0
"""math-verify in a child process that can be stopped.

math-verify's own limit is a Python signal handler: it needs the main thread, and cannot interrupt an operation on large
integers. Here the kernel ends the child.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import resource
import signal
import sys
import threading
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, Literal

from megatron_rl.rewards.child import ChildProcess

Verdict = Literal["equal", "different", "timeout", "unparsable truth"]

_LIMIT_SECONDS = 5.0
_START_SECONDS = 120.0  # to import sympy
_LIMIT_BYTES = 4 << 30
_REMEMBERED = 4096  # cache size; responses of a group often give equal answers


class Judge:
    """A thread-safe comparison of texts by math-verify in a child process, started at first use."""

    def __init__(self, limit_seconds: float = _LIMIT_SECONDS) -> None:
        self._limit_seconds, self._lock = limit_seconds, threading.Lock()
        self._child: ChildProcess | None = None

    def compare(self, answer: str, truth: str) -> Verdict:
        """Compare two texts; return "timeout" beyond the limit of time or memory."""
        with self._lock:
            if self._child is None:
                self._start()
            assert self._child is not None
            try:
                return self._child.ask((answer, truth), 2 * self._limit_seconds)
            except (TimeoutError, EOFError, OSError):
                self._end()
                return "timeout"

    def _start(self) -> None:
        self._child = ChildProcess("megatron_rl.rewards.judge")
        try:
            self._child.ask(self._limit_seconds, _START_SECONDS)
        except BaseException:
            self._end()  # or its late answer would be taken for the next verdict
            raise

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Drop the child after a fork, because two processes must not share it."""
        self._lock, self._child = threading.Lock(), None

    def _end(self) -> None:
        if self._child is not None:
            self._child.end(0.0)
            self._child = None


_JUDGE = Judge()
atexit.register(_JUDGE.close)
os.register_at_fork(after_in_child=_JUDGE.forget)


@lru_cache(_REMEMBERED)
def judge(answer: str, truth: str) -> Verdict:
    """Call `Judge.compare` with this process's child; cached."""
    return _JUDGE.compare(answer, truth)


def serve(connection: Connection) -> None:
    """Run the child: receive the time limit in seconds, then (answer, truth) pairs."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that callers must set time limits
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_LIMIT_BYTES, _LIMIT_BYTES))
    limit_seconds = connection.recv()
    connection.send(None)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            answer, truth = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, limit_seconds)  # SIGALRM without a handler ends the process
            verdict = _compare(math_verify, answer, truth)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(verdict)


def _compare(math_verify: Any, answer: str, truth: str) -> Verdict:
    try:
        gold = math_verify.parse(truth, parsing_timeout=None)
        if all(isinstance(found, str) for found in gold):
            return "unparsable truth"
        found = math_verify.parse(answer, parsing_timeout=None)
        return "equal" if math_verify.verify(gold, found, timeout_seconds=None) else "different"
    except MemoryError:
        return "timeout"
    except Exception:  # sympy raises arbitrary errors on arbitrary texts
        return "different"


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
