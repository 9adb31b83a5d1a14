# SPDX-License-Identifier: Apache-2.0
"""One job per run directory: a lock with a heartbeat, which is taken over from a dead owner.

The file `run.lock` is created exclusively (`O_EXCL`, which NFS supports); its modification time is the heartbeat. On
the owner's machine, its process number and start time decide whether it is alive; elsewhere its heartbeat does, by the
clock of the file system, since clocks of hosts differ.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path

import psutil

from megatron_rl.types import UserError

LOCK_FILE = "run.lock"
_BEAT_SECONDS = 5.0  # between two heartbeats
_DEAD_SECONDS = 30.0  # silence after which an owner on another machine is dead
_READS = 25
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock.

    Attributes:
        machine: host, boot and process namespace, in which `pid` is unique.
        started, since: when the process started and took the lock, in seconds of its host's clock.
        token: unique per lock.
    """

    host: str
    machine: str
    pid: int
    started: float
    since: float
    token: str

    @classmethod
    def here(cls) -> Owner:
        """Return this process as an owner."""
        # A process number is unique in one container and one boot.
        host, scope = socket.gethostname(), list[str]()
        with suppress(OSError):  # not Linux
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            scope = [boot, os.readlink("/proc/self/ns/pid")]
        machine, started = "/".join([host, *scope]), psutil.Process().create_time()
        return cls(host, machine, os.getpid(), started, time.time(), uuid.uuid4().hex)

    def is_running(self) -> bool:
        """Whether the process exists; only valid on its own machine."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 2.0  # else another one has its number by now
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


_UNKNOWN = Owner("an unknown host", "", 0, 0.0, 0.0, "")  # a lock whose writing was interrupted


class RunLock:
    """Lock of a run directory, held from `acquire` to `release`."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / LOCK_FILE
        self.lost: UserError | None = None  # after another job has taken it over
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._keep_fresh, name="run-lock", daemon=True)

    def acquire(self) -> str | None:
        """Take the lock, after a wait for the heartbeat of another host's owner; return a warning after a takeover.

        Raises:
            UserError: another job holds it.
            OSError: the directory cannot be written.
        """
        self._me, taken_over = Owner.here(), None
        while not self._create():
            owner = self._read()
            if owner is None:
                continue  # released just now
            if self._is_alive(owner):
                beat, held = self._last_beat(), timedelta(seconds=max(0, int(time.time() - owner.since)))
                if (owner.machine, owner.pid) == (self._me.machine, self._me.pid):
                    hint = "a Trainer of this program holds it: call its close() before you make another one"
                else:
                    hint = f"choose another trainer.run_dir, or end that job (if it is gone: remove {self.path})"
                raise UserError(
                    f"{self.path.parent} is in use: {owner} has held it for {held}, since "
                    f"{datetime.fromtimestamp(owner.since):%Y-%m-%d %H:%M:%S}; its last sign of life was "
                    f"{0.0 if beat is None else self._age(beat):.0f} s ago",
                    source="trainer.run_dir",
                    expected="a run directory that no other job writes to",
                    hint=hint,
                )
            if self._remove(owner):
                taken_over = f"{self.path.parent} was held by {owner}, which is gone: its lock was taken over"
        self._thread.start()
        return taken_over

    def release(self) -> None:
        """Release the lock; may be called again."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.0)
            with suppress(OSError):  # the lock then expires
                if self._read() == self._me:
                    self.path.unlink()

    def _create(self) -> bool:
        """Create the lock file; False if it exists."""
        try:
            with open(self.path, "x", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self._me)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            return False
        return True

    def _read(self) -> Owner | None:
        for _ in range(_READS):
            try:
                return Owner(**json.loads(self.path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                return None
            except (ValueError, TypeError):
                time.sleep(0.02)
        return _UNKNOWN

    def _is_alive(self, owner: Owner) -> bool:
        if owner.machine == self._me.machine:
            return owner.is_running()
        first = self._last_beat()
        if first is None or self._age(first) > _DEAD_SECONDS:
            return False
        _LOG.warning(
            "%s is held by %s: waiting up to %.0f s for a sign of life", self.path.parent, owner, _DEAD_SECONDS
        )
        deadline = time.monotonic() + _DEAD_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(0.5, _BEAT_SECONDS / 2))
            beat = self._last_beat()
            if beat != first:
                return beat is not None
        return False

    def _last_beat(self) -> float | None:
        try:
            with open(self.path, encoding="utf-8") as file:  # on NFS, opening a file refreshes its attributes
                return os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None

    def _age(self, moment: float) -> float:
        with tempfile.TemporaryFile(dir=self.path.parent) as probe:
            return max(0.0, os.fstat(probe.fileno()).st_mtime - moment)

    def _remove(self, dead: Owner) -> bool:
        """Remove a dead owner's lock; False if its owner has changed or another job is removing it."""
        claim = self.path.with_name(f"{LOCK_FILE}.takeover")
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            with suppress(FileNotFoundError):
                if self._age(claim.stat().st_mtime) > _DEAD_SECONDS:  # of a job that died with it
                    claim.unlink()
            time.sleep(0.01)
            return False
        try:
            is_dead_one = self._read() == dead  # again, so that a new owner's lock is never touched
            if is_dead_one:
                self.path.unlink(missing_ok=True)
            return is_dead_one
        finally:
            claim.unlink(missing_ok=True)

    def _keep_fresh(self) -> None:
        while not self._end.wait(_BEAT_SECONDS):
            try:
                owner = self._read()
                if owner is None:  # the file was removed
                    self._create()
                elif owner == self._me:
                    os.utime(self.path)
                else:
                    self.lost = UserError(
                        f"the run directory was taken over by {owner}",
                        source=str(self.path),
                        expected="one job that writes to it",
                        hint=f"this process gave no sign of life for {_DEAD_SECONDS:.0f} s; let the other job continue",
                    )
                    return
            except Exception as error:  # logged, since the next beat may succeed
                _LOG.warning("%s: no heartbeat: %r", self.path, error)
