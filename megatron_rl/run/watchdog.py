# SPDX-License-Identifier: Apache-2.0
"""A thread on every rank that ends a job that hangs or has failed elsewhere, and the job's one report of the reason.

Its heartbeat in the job's store is the rank's position: step, phase and collective. A rank *stalls* if its program
stays in one collective for `limit` seconds: every rank dumps the stacks of its threads into its log, the first stalled
rank reports which ranks wait for which, in which phase and group, and all ranks exit with EXIT_STALLED; the launcher
restarts them.
A report of another rank (`guard.py`) also ends this rank unless its program ends by itself, and a rank with a stop
signal ends when another one is gone, since they can no longer agree on a checkpoint.

The collectives in a report come from torch's flight recorder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import GroupName, Store

from megatron_rl.observability.failures import Position, Scene, explain_lost, explain_wait, find_position
from megatron_rl.observability.progress import PhaseTimers, append_to_log, show_error
from megatron_rl.types import EXIT_FAILED, EXIT_STALLED, UserError

# gloo's recorder, and NCCL's in builds that have it; names of torch 2.13, absent in builds without them.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_SHOWN = 16


def describe_collectives() -> list[str]:
    """Return the last recorded collectives of this process, oldest first, one line each."""
    entries: list[dict[str, Any]] = []
    try:
        for name in _DUMPS:
            dump = getattr(_distributed_c10d, name, None)
            if dump is not None:
                entries += json.loads(dump()).get("entries", [])
        entries.sort(key=lambda entry: entry["time_created_ns"])
        return [_describe(entry) for entry in entries[-_SHOWN:]]
    except Exception as error:  # the interface is private to torch; a report must not fail because of it
        return [f"torch's flight recorder cannot be read: {type(error).__name__}: {error}"]


def _describe(entry: dict[str, Any]) -> str:
    name, group, ranks = entry["profiling_name"].partition(":")[2], GroupName(entry["process_group"][0]), ""
    with contextlib.suppress(KeyError, RuntimeError, ValueError):  # a group that is gone
        found = dist.get_process_group_ranks(_distributed_c10d._resolve_process_group(group))
        ranks = f" of ranks {','.join(map(str, found)) if len(found) <= 4 else f'{found[0]}..{found[-1]}'}"
    state = "done" if entry["retired"] or entry["state"] == "completed" else "under way"
    seconds = time.time() - entry["time_created_ns"] / 1e9
    return f"{name} #{entry['collective_seq_id']}{ranks}, begun {seconds:.1f} s ago, {state}"


_POLL_SECONDS = 0.1
_REPORT_SECONDS = 15.0  # from a claim to its report
_SHOWN_SECONDS = 10.0  # until rank 0 has seen the report, has waited for its own program, and has shown it


@dataclass(frozen=True)
class Report:
    """Final report of a job: text, exit status of all ranks, and author."""

    text: str
    code: int
    rank: int


class ReportBoard:
    """This rank's access to the one report of why the job ends, in the job's key-value store; thread-safe."""

    def __init__(self, store: Store, rank: int, log_file: Path) -> None:
        self._store, self._rank, self._log_file = store, rank, log_file
        self._lock, self._is_concluded = threading.Lock(), False

    def claim(self) -> bool:
        """Return True for the job's first caller, which must post a report."""
        return self._store.add("claimed", 1) == 1

    def post(self, text: str, code: int) -> None:
        """Publish a report to all ranks."""
        self._store.set("report", json.dumps(asdict(Report(text, code, self._rank))))

    @property
    def is_posted(self) -> bool:
        """Whether a report exists."""
        return self._store.check(["report"])

    def wait_for(self, keys: list[str], seconds: float) -> bool:
        """Return True as soon as all keys are in the store, False after the time limit."""
        deadline = time.monotonic() + seconds
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def have_all_come(self, world_size: int, seconds: float) -> bool:
        """Record this rank's failure; return whether all ranks fail within the time limit."""
        self._store.set(f"failed/{self._rank}", "")
        return self.wait_for([f"failed/{rank}" for rank in range(world_size)], seconds)

    def conclude(self) -> Report | None:
        """Wait for the report and return it, `None` without one; rank 0 prints it, or its author if rank 0 is gone."""
        if not self.wait_for(["report"], _REPORT_SECONDS):
            return None
        report = Report(**json.loads(self._store.get("report")))
        with self._lock:  # the program and the watchdog may both come here
            if self._is_concluded:
                return report
            self._is_concluded = True
            if self._rank == 0:
                show_error(report.text, self._log_file)
                self._store.set("shown", "")
            elif not self.wait_for(["shown"], _SHOWN_SECONDS) and report.rank == self._rank:
                show_error(report.text, self._log_file)
            else:
                append_to_log(self._log_file, f"the job ends: {report.text}")
        return report


_ANSWER_SECONDS = 5.0  # ranks look every second
_SILENT_SECONDS = 15.0  # without a heartbeat: the process is gone or suspended
_GRACE_SECONDS = 3.0  # for a program that raises the failure that another rank has reported

_Heard = dict[int, tuple[int, float]]  # rank -> its last look, and when it arrived


@dataclasses.dataclass(frozen=True)
class Watched:
    """A watched rank."""

    rank: int
    world_size: int
    timers: PhaseTimers
    limit: float  # seconds that the rank may wait in one collective
    log_file: Path  # receives the stacks of all threads if the watchdog ends the job
    log: logging.Logger
    is_stopping: Callable[[], bool] = lambda: False  # whether this rank received a stop signal
    # Apply `limit` outside of collectives, too (on CUDA the program waits for the device there).
    any_place: bool = False
    roles: str = ""  # ranks of each role, for the report; empty if every rank has all roles


class Watchdog:
    """Thread that publishes the position (step, phase, collective) of its creator thread, and ends a stalled job."""

    def __init__(self, watched: Watched, store: Store) -> None:
        # The store needs a connection of its own: a call of the program on the same one would block the heartbeats.
        self.watched, self._store = watched, store
        self.board = ReportBoard(store, watched.rank, watched.log_file)
        self._program, self._position, self._since = threading.get_ident(), None, time.monotonic()
        self._heard: _Heard = {}
        self._looks, self._closing, self._is_handed_over = 0, threading.Event(), threading.Event()
        self._interval = min(1.0, watched.limit / 20)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def hand_over(self) -> None:
        """Send only heartbeats from now on, since the failed program reports its error."""
        self._is_handed_over.set()

    def close(self) -> None:
        """Stop watching; the last heartbeat marks an orderly exit."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(_ANSWER_SECONDS)

    def positions(self) -> list[Position | None]:
        """Return every rank's last position, `None` before its first; thread-safe."""
        return self._collect("beat")

    def find_silent(self, seconds: float) -> list[Position]:
        """Wait for ranks without a heartbeat for `seconds`, return their last positions; [] if a report is posted."""
        deadline, heard = time.monotonic() + 2 * seconds, {}
        while time.monotonic() < deadline and not self.board.is_posted:
            silent = self._listen(heard, seconds, counts_closed=True)
            if silent:
                return silent
            time.sleep(0.2)
        return []

    def _listen(self, heard: _Heard, seconds: float, *, counts_closed: bool) -> list[Position]:
        """Return positions of other ranks whose heartbeat has not changed for `seconds`.

        Args:
            heard: state between calls, empty at first.
            counts_closed: include ranks that left in good order.
        """
        silent, now = [], time.monotonic()
        for beat in self.positions():
            if beat is None or beat.rank == self.watched.rank:
                continue
            looks, since = heard.get(beat.rank, (beat.looks, now))
            since = since if beat.looks == looks else now
            heard[beat.rank] = beat.looks, since
            if counts_closed if beat.is_closed else now - since > seconds:
                silent.append(beat)
        return silent

    def _run(self) -> None:
        try:
            self._look()  # at once, so that a rank that dies early has left a heartbeat
            while not self._closing.wait(self._interval):
                self._look()
            if self._position is not None:
                self._publish("beat", dataclasses.replace(self._position, is_closed=True))
        except Exception as error:  # the store's host, a rank or torchrun's agent, is gone
            if not self._closing.is_set():
                self.watched.log.warning("watchdog: the job's store does not answer: %s", error)
            while not self._closing.wait(self._interval):
                if self._update() >= self.watched.limit and self._position and self._position.operation:
                    self.watched.log.error("no progress in %g s: %s", self.watched.limit, self._position.describe())
                    self._dump_stacks()
                    self.leave(EXIT_STALLED)

    def _look(self) -> None:
        seconds = self._update()
        position = self._position
        if position is None:
            return
        self._publish("beat", position)
        if self._is_handed_over.is_set():
            return
        # Before the first phase, construction may take long at one place without waiting for another rank.
        watched = self.watched
        is_waiting = position.operation is not None or (watched.any_place and watched.timers.num_entered > 0)
        is_stalled = is_waiting and seconds >= watched.limit and watched.world_size > 1
        if self._store.check(["stalled"]) or is_stalled:
            self._answer_stall(position)
        elif self.board.is_posted:
            if not self._is_handed_over.wait(_GRACE_SECONDS):
                self._dump_stacks()
                self._conclude(EXIT_FAILED)
        elif watched.is_stopping() and (gone := self._listen(self._heard, _SILENT_SECONDS, counts_closed=False)):
            if self.board.claim():
                scene = Scene(watched.rank, position.step, position.phase, watched.log_file)
                lost = explain_lost(gone, scene, "asked to stop, and no checkpoint is possible")
                self.board.post(str(lost), EXIT_FAILED)
            self._dump_stacks()
            self._conclude(EXIT_FAILED)

    def _update(self) -> float:
        """Update the position; return the seconds since it changed."""
        found, now = find_position(self.watched.rank, self.watched.timers, self._program), time.monotonic()
        last, self._looks = self._position, self._looks + 1
        if found is None or last is None or found != dataclasses.replace(last, seconds=0.0, looks=0, memory=0):
            self._since = now
        seconds = now - self._since
        memory = self.watched.timers.memory
        self._position = found and dataclasses.replace(found, seconds=seconds, looks=self._looks, memory=memory)
        return seconds

    def _publish(self, key: str, position: Position) -> None:
        self._store.set(f"{key}/{self.watched.rank}", position.encode())

    def _collect(self, key: str) -> list[Position | None]:
        names = [f"{key}/{rank}" for rank in range(self.watched.world_size)]
        return [Position.decode(self._store.get(name)) if self._store.check([name]) else None for name in names]

    def _answer_stall(self, position: Position) -> None:
        """Publish this rank's position and end the process; the first rank to detect the stall reports it."""
        is_first = self._store.add("stalled", 1) == 1
        recent = tuple(describe_collectives())
        self._publish("answer", dataclasses.replace(position, recent=recent))
        self._dump_stacks(recent)
        if is_first and self.board.claim():
            watched = self.watched
            self.board.wait_for([f"answer/{rank}" for rank in range(watched.world_size)], _ANSWER_SECONDS)
            answers = self._collect("answer")
            silent = [rank for rank, answer in enumerate(answers) if answer is None]
            roles = f"\n  roles: {watched.roles}" if watched.roles else ""
            stall = UserError(
                f"no progress in {watched.limit:g} s (trainer.collective_timeout): "
                f"{explain_wait(answers, silent)}{roles}",
                source=f"the watchdog of rank {watched.rank}",
                expected="ranks that answer each other within that time",
                hint=f"the stacks of all threads of rank N are in {watched.log_file.parent}/rank<N>.log; raise "
                "trainer.collective_timeout if the late rank was only slow",
            )
            self.board.post(str(stall), EXIT_STALLED)
        self._conclude(EXIT_STALLED)

    def _dump_stacks(self, recent: tuple[str, ...] = ()) -> None:
        with contextlib.suppress(OSError), open(self.watched.log_file, "a", encoding="utf-8") as file:
            rank = self.watched.rank
            file.write("".join(f"collective of rank {rank}: {line}\n" for line in recent))
            file.write(f"stacks of all threads of rank {rank}:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _conclude(self, code: int) -> None:
        report = self.board.conclude()
        self.leave(report.code if report else code)

    def leave(self, code: int) -> None:
        """End the process at once."""
        for handler in self.watched.log.handlers:
            handler.flush()
        sys.stdout.flush()
        if self.watched.rank == 0:
            time.sleep(1.0)  # this process may host the store, which other ranks still read
        self._closing.set()
        os._exit(code)
