# SPDX-License-Identifier: Apache-2.0
"""The environments of one rank, each in a process of its own, with a deadline for every answer and for their sum.

Invariant: every episode that was opened, or told a reply, gets an `Answer`: its own, or one that says how it failed. A
failed one is killed at once. No process outlives its rank.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import time
from collections.abc import Hashable
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_rl.agents.episode import Answer, Opening, Setup
from megatron_rl.rewards.child import ChildProcess
from megatron_rl.types import Prompt, UserError

_START_SECONDS = 120.0  # for the imports of the user's file
_GRACE_SECONDS = 5.0  # on a busy machine, for a worker to end what its episodes have started
_LARGEST_ANSWER = 64 << 20  # bytes


class _Running:
    """One episode's process, seen from the rank."""

    def __init__(self, worker: ChildProcess, seconds: float) -> None:
        self.origin, self.seconds = worker, seconds
        self.pid: int | None = None
        self._asked = 0.0
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        with theirs:
            worker.tell("begin", theirs.fileno())

    def ask(self, message: object) -> None:
        """The clock of an answer starts."""
        self._asked = time.monotonic()
        self.connection.send(message)

    def receive(self) -> Answer | None:
        """An answer; the process tells its number before the first one."""
        message = pickle.loads(self.connection.recv_bytes(_LARGEST_ANSWER))
        if isinstance(message, int):
            self.pid = message
            return None
        self.seconds -= time.monotonic() - self._asked
        return message

    def deadline(self, turn_seconds: float) -> float:
        """When an answer is late."""
        return self._asked + min(self.seconds, turn_seconds)


class EpisodeProcesses:
    """Opens episodes, tells them replies and waits for their answers; one thread uses it.

    Args:
        setup: of all episodes.
        num_workers: processes from which the episodes' processes are forked.
        episode_seconds: that an environment may take for all its answers together, the first one included.
        turn_seconds: for one of them.
    """

    def __init__(self, setup: Setup, num_workers: int, episode_seconds: float, turn_seconds: float) -> None:
        self._setup, self._episode_seconds, self._turn_seconds = setup, episode_seconds, turn_seconds
        self._workers: list[ChildProcess | None] = [None] * num_workers
        self._running: dict[Hashable, _Running] = {}
        self._waited_for: set[Hashable] = set()
        self._failed: dict[Hashable, Answer] = {}
        self._num_opened = 0

    def open(self, key: Hashable, prompt: Prompt) -> None:
        """Begin an episode; its first answer is to nothing.

        Raises:
            UserError: the environment cannot be imported in a worker.
        """
        number = self._num_opened % len(self._workers)
        self._num_opened += 1
        try:
            self._running[key] = _Running(self._find_worker(number), self._episode_seconds)
        except OSError:  # it was killed, and the episodes of before with it
            self._end_worker(number)
            self._running[key] = _Running(self._find_worker(number), self._episode_seconds)
        self._ask(key, Opening.of(prompt, self._setup.run_seed))

    def tell(self, key: Hashable, tokens: list[int], logprobs: list[float], finish_reason: str) -> None:
        """Tell an episode a reply: its tokens and the log-prob of each."""
        self._ask(key, (tokens, logprobs, finish_reason))

    def wait(self) -> dict[Any, Answer]:
        """The answers of all episodes that were opened or told something since the last call, by key."""
        found, self._failed = self._failed, {}
        while self._waited_for:
            of = {self._running[key].connection: key for key in self._waited_for}
            times = {
                key: self._running[key].deadline(self._turn_seconds) - time.monotonic() for key in self._waited_for
            }
            for connection in wait(list(of), max(min(times.values()), 0.0)):
                assert isinstance(connection, Connection)
                if (answer := self._receive(of[connection])) is not None:
                    found[of[connection]] = answer
            for key in [
                key for key in self._waited_for if time.monotonic() >= self._running[key].deadline(self._turn_seconds)
            ]:
                found[key] = self._fail(key, "timeout", self._describe_deadline(key))
        return found

    def close(self, key: Hashable) -> None:
        """The episode is over: end its process."""
        self._waited_for.discard(key)
        running = self._running.pop(key, None)
        if running is not None:
            running.connection.close()
            if running.pid is not None:
                with contextlib.suppress(OSError):  # then its process has ended, too
                    running.origin.tell(running.pid)

    def close_all(self) -> None:
        """End all processes."""
        for key in [*self._running]:
            self.close(key)
        for number in range(len(self._workers)):
            self._end_worker(number)

    def _find_worker(self, number: int) -> ChildProcess:
        worker = self._workers[number]
        if worker is None:
            worker = self._workers[number] = ChildProcess("megatron_rl.agents.worker")
            try:
                error = worker.ask(self._setup, _START_SECONDS)
            except (TimeoutError, EOFError, OSError) as caught:
                error = UserError(
                    f"a process for environments did not start: {type(caught).__name__}",
                    source=self._setup.source,
                    expected=f"a file that is imported within {_START_SECONDS:g} s",
                    hint="look at its messages on stderr",
                )
            if error is not None:
                self._end_worker(number)
                raise error
        return worker

    def _end_worker(self, number: int) -> None:
        worker, self._workers[number] = self._workers[number], None
        if worker is not None:
            worker.dismiss()
            worker.end(_GRACE_SECONDS)

    def _ask(self, key: Hashable, message: object) -> None:
        self._waited_for.add(key)
        try:
            self._running[key].ask(message)
        except OSError:
            self._failed[key] = self._fail(key, "error", "its process has ended")

    def _receive(self, key: Hashable) -> Answer | None:
        """What an episode says, if it is an answer."""
        try:
            answer = self._running[key].receive()
        except (EOFError, OSError):
            return self._fail(key, "error", "its process has ended, or has answered more than 64 MiB")
        if answer is not None:
            self._waited_for.discard(key)
            if answer.finish_reason == "error":
                return self._fail(key, "error", answer.failure)
        return answer

    def _describe_deadline(self, key: Hashable) -> str:
        is_turn = self._turn_seconds < self._running[key].seconds
        setting = "turn_timeout_seconds" if is_turn else "episode_timeout_seconds"
        return f"no answer within agents.{setting} = {self._turn_seconds if is_turn else self._episode_seconds:g}"

    def _fail(self, key: Hashable, reason: str, failure: str) -> Answer:
        self.close(key)
        return Answer(finish_reason=reason, failure=failure)
