# SPDX-License-Identifier: Apache-2.0
"""A thread on every rank that ends a run that hangs, and says why.

Every look writes the rank's position (`positions.py`) to the job's store: the heartbeat. A rank whose program is seen
in the same collective at every look for `limit` seconds *stalls*: it asks all ranks for their positions, every rank
dumps the stacks of all its threads into its log, the first to stall writes one report (who waits for whom, in which
phase and group), rank 0 shows it, and all ranks exit with EXIT_STALLED; the launcher restarts them. A rank that is
asked to stop ends when another is gone, since the ranks can no longer agree on a checkpoint.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megatron_rl.observability.positions import Position, explain, find_position
from megatron_rl.observability.timers import PhaseTimers
from megatron_rl.types import EXIT_STALLED

_ANSWER_SECONDS = 5.0  # a rank that looks every second answers sooner
_SILENT_SECONDS = 15.0  # without a heartbeat: the process is gone, or nothing of it runs


class Store(Protocol):
    """What is used of the job's key-value store; must be safe to use while the program waits in a collective."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read what is there; waits where nothing is."""

    def add(self, key: str, value: int) -> int:
        """Add to a number (0 at first) and return it."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""


@dataclasses.dataclass(frozen=True)
class Watched:
    """What is watched.

    Attributes:
        rank, world_size: this rank and their number.
        timers: tell the phases of the program.
        limit: seconds that it may wait in one collective.
        log_file: where the stacks go.
        log: of the rank; rank 0's is shown on the console.
        is_stopping: whether this rank was asked to stop.
        any_place: take any place for a collective (CUDA: the program waits for the device, not in a collective).
    """

    rank: int
    world_size: int
    timers: PhaseTimers
    limit: float
    log_file: Path
    log: logging.Logger
    is_stopping: Callable[[], bool] = lambda: False
    any_place: bool = False


class Watchdog:
    """Watches the thread that builds it until `close`.

    Args:
        watched: this rank.
        store: a connection of its own, under a prefix of this run.
        end: called with the exit code after a stall; ends the process.
    """

    def __init__(self, watched: Watched, store: Store, end: Callable[[int], None] = os._exit) -> None:
        self._watched, self._store, self._end = watched, store, end
        self._program, self._position, self._since = threading.get_ident(), None, time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}
        self._looks, self._closing = 0, threading.Event()
        self._interval = min(1.0, watched.limit / 20)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; the other ranks learn that this one has left in good order."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(_ANSWER_SECONDS)

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._interval):
                self._look()
            if self._position is not None:
                self._publish("beat", dataclasses.replace(self._position, is_closed=True))
        except Exception as error:  # the store is gone, with the rank or the agent that kept it
            if not self._closing.is_set():
                self._watched.log.warning("watchdog: the job's store does not answer: %s", error)
                self._watch_alone()

    def _look(self) -> None:
        seconds = self._update()
        if self._position is None:
            return
        self._publish("beat", self._position)
        if self._store.check(["stalled"]) or self._is_stalled(seconds):
            self._report()
        elif self._watched.is_stopping():
            self._end_if_peers_are_gone()

    def _update(self) -> float:
        """Look at the program; returns the seconds for which it has been seen at the same place."""
        found, now = find_position(self._watched.rank, self._watched.timers, self._program), time.monotonic()
        last, self._looks = self._position, self._looks + 1
        if found is None or last is None or found != dataclasses.replace(last, seconds=0.0, looks=0):
            self._since = now
        seconds = now - self._since
        self._position = found and dataclasses.replace(found, seconds=seconds, looks=self._looks)
        return seconds

    def _is_stalled(self, seconds: float) -> bool:
        is_waiting = self._position.operation is not None or self._watched.any_place
        return is_waiting and seconds >= self._watched.limit and self._watched.world_size > 1

    def _publish(self, key: str, position: Position) -> None:
        self._store.set(f"{key}/{self._watched.rank}", position.encode())

    def _read(self, key: str, rank: int) -> Position | None:
        name = f"{key}/{rank}"
        return Position.decode(self._store.get(name)) if self._store.check([name]) else None

    def _report(self) -> None:
        """Answer to a stall; the first to notice it collects the answers and explains it."""
        watched, store = self._watched, self._store
        is_first = store.add("stalled", 1) == 1
        self._dump_stacks()
        self._publish("answer", self._position)
        if is_first:
            store.set("report", self._collect())
        if self._wait_for("report", 3 * _ANSWER_SECONDS):
            text = store.get("report").decode()
            watched.log.error("%s", text)
            if watched.rank == 0:
                store.set("shown", "")
            elif is_first and not self._wait_for("shown", _ANSWER_SECONDS):
                print(text, file=sys.stderr, flush=True)
        if watched.rank == 0:
            time.sleep(1.0)  # it may keep the store that others still read
        self._leave(EXIT_STALLED)

    def _collect(self) -> str:
        """The report."""
        ranks, deadline = range(self._watched.world_size), time.monotonic() + _ANSWER_SECONDS
        keys = [f"answer/{rank}" for rank in ranks]
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.1)
        answers = [self._read("answer", rank) for rank in ranks]
        silent = [rank for rank, answer in enumerate(answers) if answer is None]
        return (f"no progress in {self._watched.limit:g} s (trainer.collective_timeout): {explain(answers, silent)}\n"
                f"  the stacks of all threads of rank N are in {self._watched.log_file.parent}/rank<N>.log")

    def _wait_for(self, key: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _end_if_peers_are_gone(self) -> None:
        now = time.monotonic()
        for rank in range(self._watched.world_size):
            beat = self._read("beat", rank)
            if beat is None or beat.is_closed:
                continue
            looks, since = self._heard.get(rank, (-1, now))
            self._heard[rank] = (beat.looks, now if beat.looks != looks else since)
            if now - self._heard[rank][1] > _SILENT_SECONDS:
                self._watched.log.error(
                    "asked to stop, but rank %d has given no sign of life for %.0f s: no checkpoint is possible", rank,
                    now - self._heard[rank][1])
                self._dump_stacks()
                self._leave(1)

    def _watch_alone(self) -> None:
        """Without the store: end this rank when it stalls."""
        while not self._closing.wait(self._interval):
            if self._update() >= self._watched.limit and self._position and self._position.operation:
                self._watched.log.error("no progress in %g s: %s", self._watched.limit, self._position.describe())
                self._dump_stacks()
                self._leave(EXIT_STALLED)

    def _dump_stacks(self) -> None:
        with open(self._watched.log_file, "a", encoding="utf-8") as file:
            file.write(f"stacks of all threads of rank {self._watched.rank}:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _leave(self, code: int) -> None:
        for handler in self._watched.log.handlers:
            handler.flush()
        sys.stdout.flush()
        self._closing.set()
        self._end(code)
