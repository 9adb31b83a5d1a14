# SPDX-License-Identifier: Apache-2.0
"""Order of a server's requests: one queue, in which each model's requests run once and in the order of their numbers.

A client numbers the requests of a model 1, 2, 3 and sends them before the earlier ones are answered, over several
connections, and a request again if its answer was lost. The thread of HTTP adds calls; the main thread takes them.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.types import UserError, text_of

SAMPLE = "sample"


class BusyError(Exception):
    """Too much waits; the same request succeeds later (429)."""


@dataclass(frozen=True)
class Answer:
    """The body of a response, with its media type."""

    body: bytes
    media_type: str = "application/x-protobuf"


def answer_json(content: dict[str, Any]) -> Answer:
    """Return an answer with a JSON object."""
    return Answer(json.dumps(content).encode(), "application/json")


def answer_error(error: Exception) -> Answer:
    """Return the answer of a request that failed, which leaves the client usable."""
    category = "user" if isinstance(error, UserError) else "server"
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {text_of(error)}"
    return answer_json({"error": text, "category": category})


@dataclass(eq=False)
class Call:
    """A request that waits or runs.

    Attributes:
        kind: the action; calls of kind `SAMPLE` with equal `group` may run together.
        payload: its arguments, or the error that it is to be answered with.
        reply: makes the answer of the result, a JSON object or the bytes of a message.
        size: bytes of its body.
    """

    request_id: str
    kind: str
    payload: Any
    reply: Callable[[Any], Any]
    group: Any = None
    size: int = 0
    answer: Future[Answer] = field(default_factory=Future)
    finished_at: float = 0.0

    def __post_init__(self) -> None:
        """Make the answer one that a waiting client cannot cancel."""
        self.answer.set_running_or_notify_cancel()


@dataclass
class _Sequence:
    """Numbered requests of a model: the next number to run, and those that came too early."""

    next: int = 1
    waiting: dict[int, Call] = field(default_factory=dict)
    since: float = 0.0  # of the last progress


class RequestQueue:
    """Calls in the order in which they run, and their answers until the client has had time to fetch them.

    Args:
        most_samples: sampling requests that may wait.
        most_bytes: total size of the bodies that may wait.
        gap_seconds: after which requests that wait for one that never came are answered with an error.
        keep_seconds: for which answers are kept.
        quiet_seconds: without another call, after which waiting samples run.
    """

    def __init__(
        self,
        most_samples: int = 2048,
        most_bytes: int = 1 << 30,
        gap_seconds: float = 600.0,
        keep_seconds: float = 900.0,
        quiet_seconds: float = 0.02,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._gap_seconds = (most_samples, most_bytes), gap_seconds
        self._keep_seconds, self._quiet_seconds, self._now = keep_seconds, quiet_seconds, now
        self._changed = threading.Condition()
        self._ready: deque[Call] = deque()
        self._sequences: dict[str, _Sequence] = {}
        self._calls: dict[str, Call] = {}
        self._finished: deque[Call] = deque()  # in the order of `finished_at`
        self._held = 0  # bytes of the calls that wait

    def open_model(self, model_id: str) -> bool:
        """Begin the numbered requests of a model; return False if it was open."""
        with self._changed:
            is_new = model_id not in self._sequences
            self._sequences.setdefault(model_id, _Sequence(since=self._now()))
            return is_new

    def close_model(self, model_id: str) -> None:
        """End the numbered requests of a model; those that wait for an earlier one run, and find no model."""
        with self._changed:
            sequence = self._sequences.pop(model_id, None)
            if sequence is not None:
                self._ready.extend(call for _, call in sorted(sequence.waiting.items()))
                self._changed.notify()

    def add(self, call: Call) -> None:
        """Add a call without a number; one with the same id is a repetition.

        Raises:
            BusyError: too many samples or bytes wait.
        """
        with self._changed:
            if call.request_id not in self._calls:
                self._admit(call)
                self._ready.append(call)
                self._changed.notify()

    def add_numbered(self, model_id: str, number: int, call: Call) -> None:
        """Add a model's call, which runs after all smaller numbers; a number that was used before is a repetition.

        Raises:
            BusyError: too many bytes wait; never for the number that is to run next.
        """
        with self._changed:
            if (sequence := self._sequences.get(model_id)) is None:  # closed since the request came
                self.add(call)
                return
            if number < sequence.next or number in sequence.waiting:
                return
            self._admit(call, is_due=number == sequence.next)
            sequence.waiting[number] = call
            self._advance(sequence)

    def _advance(self, sequence: _Sequence) -> None:
        while (call := sequence.waiting.pop(sequence.next, None)) is not None:
            self._ready.append(call)
            sequence.next += 1
            sequence.since = self._now()
        self._changed.notify()

    def _admit(self, call: Call, is_due: bool = False) -> None:
        most_samples, most_bytes = self._limits
        is_full = self._held + call.size > most_bytes and self._held > 0 and not is_due
        is_crowded = call.kind == SAMPLE and len(self._ready) >= most_samples
        if is_full or (is_crowded and sum(one.kind == SAMPLE for one in self._ready) >= most_samples):
            raise BusyError("too many requests wait; send it again in a second")
        self._held += call.size
        self._calls[call.request_id] = call

    def take(self, seconds: float) -> list[Call]:
        """Return the next call, or all waiting samples of its group; nothing if none comes within some seconds."""
        with self._changed:
            self._clean()
            if not self._changed.wait_for(lambda: self._ready, seconds):
                return []
            if self._ready[0].kind == SAMPLE:
                self._gather()
            taken = [call := self._ready.popleft()]
            if call.kind == SAMPLE:
                rest = deque[Call]()
                for one in self._ready:
                    (taken if one.kind == SAMPLE and one.group == call.group else rest).append(one)
                self._ready = rest
            return taken

    def _gather(self) -> None:
        """Wait until no call has come for a moment: a client's samples arrive one by one, and run faster together."""
        quiet, deadline = self._quiet_seconds, time.monotonic() + 20 * self._quiet_seconds
        count = 0
        while len(self._ready) > count and time.monotonic() < deadline:
            count = len(self._ready)
            self._changed.wait(quiet)

    def finish(self, call: Call, answer: Answer) -> None:
        """Store the answer of a call that was taken."""
        with self._changed:
            self._held -= call.size
            call.payload, call.finished_at = None, self._now()
            self._finished.append(call)
        call.answer.set_result(answer)

    def find(self, request_id: str) -> Future[Answer] | None:
        """Return the answer to come of a request; `None` if it is unknown, or was kept for long enough."""
        with self._changed:
            call = self._calls.get(request_id)
            return None if call is None else call.answer

    def cancel(self, request_id: str) -> None:
        """Remove a sample that has not begun."""
        with self._changed:
            for call in [one for one in self._ready if one.request_id == request_id and one.kind == SAMPLE]:
                self._ready.remove(call)
                self.finish(call, answer_error(UserError("canceled", source=request_id, expected="", hint="")))

    def count(self) -> dict[str, int]:
        """Return the numbers of calls that are ready, and that wait for an earlier one."""
        with self._changed:
            early = sum(len(sequence.waiting) for sequence in self._sequences.values())
            return {"ready": len(self._ready), "early": early, "answers": len(self._calls)}

    def _clean(self) -> None:
        """Forget old answers, and end the wait for requests that never came."""
        now = self._now()
        while self._finished and now - self._finished[0].finished_at > self._keep_seconds:
            self._calls.pop(self._finished.popleft().request_id, None)
        for model_id, sequence in self._sequences.items():
            if sequence.waiting and now - sequence.since > self._gap_seconds:
                error = UserError(
                    f"request {sequence.next} of {model_id} never came, and later ones wait for it",
                    source=model_id,
                    expected="requests 1, 2, 3, ... without gaps",
                    hint="load the last checkpoint into a new training client",
                )
                for _, call in sorted(sequence.waiting.items()):
                    call.payload = error
                    self._ready.append(call)
                sequence.next = max(sequence.waiting) + 1
                sequence.waiting.clear()
