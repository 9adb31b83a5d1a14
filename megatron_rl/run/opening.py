# SPDX-License-Identifier: Apache-2.0
"""Open a run: lock its directory, choose and check the checkpoint to resume from, catch stop signals.

One job has a run directory, by a lock with a heartbeat that is taken over from a dead owner. The file `run.lock` is
created exclusively (`O_EXCL`, which NFS supports); its modification time is the heartbeat. On the owner's machine, its
process number and start time decide whether it is alive; elsewhere its heartbeat does, by the clock of the file system,
since clocks of hosts differ.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist
import yaml

from megatron_rl.checkpoint.directory import find_newest_valid, find_step, read_manifest
from megatron_rl.config.fields import dump_yaml
from megatron_rl.config.schema import RunConfig
from megatron_rl.extension.registry import GYM, HUB, OBJECT
from megatron_rl.observability.metrics import METRICS_FILE, has_records
from megatron_rl.observability.run import Run
from megatron_rl.parallel.collectives import failing_together, gather_objects, open_store, share_object, world
from megatron_rl.run.guard import Guard
from megatron_rl.types import UserError

Dependencies = dict[str, dict[str, str]]  # name -> {"source": paths, "digest": of their content}
_SAID_ONLY = ("validation_files", "program")  # all others change the training
_WEIGHTS = (".safetensors", ".distcp")
_BLOCK, _MOST_BLOCKS = 64 << 10, 128


def find_dependencies(config: RunConfig) -> Dependencies:
    """Digest the files that a run depends on and its checkpoints do not contain.

    Data and code are read completely (about 1 GB/s), weights in samples (8 MiB per file): training changes all
    matrices, but an edit of a few numbers may go unnoticed.
    """
    base = config.model.path
    weights = {
        "model": [base] if config.actor.lora.rank else [],
        "critic": [config.critic.path or base] if config.critic.lora.rank else [],
        "reference": [config.reference.path or base] if config.algorithm.kl_coef > 0 else [],
        "reward_model": [config.section(role).path for role in config.reward_model.roles.values()],
        "teachers": [teacher.path for teacher in config.teachers.values()],
    }
    found = {
        name: [file for path in paths for file in sorted(Path(path).iterdir()) if file.suffix in _WEIGHTS]
        for name, paths in weights.items()
    }
    found["train_files"] = [Path(file) for file in config.data.train_files]
    orders = (str(order) for order in (config.data.shuffle, config.data.curriculum.kind))
    found["train_files"] += [Path(order.rpartition(":")[0]) for order in orders if ":" in order]
    found["validation_files"] = [Path(file) for file in config.data.validation_files]
    targets = [target for one in config.by_source.values() for target in one.reward.targets or [one.reward.function]]
    functions = {Path(target.rpartition(":")[0]) for target in targets if "://" not in target}
    functions = {path for path in functions if path.is_file()}  # rules have names, not files
    main = getattr(sys.modules["__main__"], "__file__", None)  # defines functions passed as objects
    program = {path for path in functions if main is not None and path.resolve() == Path(main).resolve()}
    found |= {"reward": sorted(functions - program), "program": sorted(program)}
    found["plugins"] = [Path(file) for file in config.algorithm.plugins]
    return {
        name: {
            "source": ", ".join(dict.fromkeys(str(file.parent if file.suffix in _WEIGHTS else file) for file in files)),
            "digest": _digest(files, samples=name in weights),
        }
        for name, files in found.items()
        if files
    }


def check_dependencies(saved: Dependencies, now: Dependencies, allowed: Iterable[str], checkpoint: Path) -> list[str]:
    """Return the accepted differences, one line each, between the dependencies of a run and of a checkpoint's run.

    Args:
        saved, now: from `find_dependencies`.
        allowed: `checkpoint.allow_changes`.

    Raises:
        UserError: a difference that changes the training.
    """
    lines = {
        name: f"{name}: {now[name]['source']} (digest {now[name]['digest'][:12]}), it was "
        f"{saved[name]['source']} (digest {saved[name]['digest'][:12]})"
        for name in now
        if name in saved and now[name]["digest"] != saved[name]["digest"]
    }
    refused = [name for name in lines if name not in (*_SAID_ONLY, *allowed)]
    if refused:
        raise UserError(
            f"the content of the run's inputs has changed: {'; '.join(lines[name] for name in refused)}",
            source=str(checkpoint),
            expected="what the run behind the checkpoint had",
            hint=f"restore it, or accept the new one by checkpoint.allow_changes=[{','.join(refused)}]",
        )
    return list(lines.values())


def _digest(files: Iterable[Path], *, samples: bool) -> str:
    whole = hashlib.blake2b(digest_size=20)
    for path in files:
        name = str(path)
        if name.startswith(GYM):
            from megatron_rl.extension.reasoning_gym import identify

            name = identify(name)
        if str(path).startswith((GYM, OBJECT)):
            whole.update(name.encode())
            continue
        if str(path).startswith(HUB):
            whole.update(str(path).encode())  # the name has the commit
            continue
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            whole.update(size.to_bytes(8))
            if samples and size > _BLOCK * _MOST_BLOCKS:
                for block in range(_MOST_BLOCKS):
                    file.seek((size - _BLOCK) * block // (_MOST_BLOCKS - 1))
                    whole.update(file.read(_BLOCK))
            else:
                while content := file.read(1 << 20):
                    whole.update(content)
    return whole.hexdigest()


def describe_changes(before: str, now: str) -> list[str]:
    """Return the settings that differ between two resolved configs in YAML."""
    old, new = (_flatten(yaml.safe_load(text) or {}) for text in (before, now))
    return [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


LOCK_FILE = "run.lock"
_BEAT_SECONDS = 5.0  # between two heartbeats
_DEAD_SECONDS = 30.0  # silence after which an owner on another machine is dead
_READS = 25  # of a lock that its owner is writing
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    host: str
    machine: str  # host, boot and process namespace, in which `pid` is unique
    pid: int
    # started, since: when the process started and took the lock, in seconds of its host's clock.
    started: float
    since: float
    token: str  # unique per lock

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


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Handler of `STOP_SIGNALS` until `close`; `signal` is the number of this rank's first such signal, else 0."""

    def __init__(self, log: logging.Logger) -> None:
        self.signal, self._told = 0, False
        self._previous, self._wakeup, self._previous_wakeup = {}, None, -1
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
            # Python runs `_note` only when the main thread returns from C++, which never happens in a collective
            # without its peer. The interpreter writes the signal's number to this socket at once.
            self._wakeup = socket.socketpair()
            for end in self._wakeup:
                end.setblocking(False)
            self._previous_wakeup = signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
        else:  # Ray Train runs a rank in a thread
            log.info("signals are not caught: the program does not run in the main thread")

    @property
    def is_here(self) -> bool:
        """Whether this rank has received a stop signal; safe to read from another thread."""
        if not self.signal and self._wakeup is not None:
            with suppress(BlockingIOError):
                self._told = self._told or any(number in STOP_SIGNALS for number in self._wakeup[0].recv(4096))
        return self._told or bool(self.signal)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.signal:
            self.signal = number

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._previous_wakeup)
            for end in self._wakeup:
                end.close()
        self._previous, self._wakeup = {}, None


@dataclass(frozen=True)
class OpenedRun:
    """A run whose directory is open, but whose log and metric files are not."""

    run: Run
    checkpoint: Path | None  # to resume from; `None` starts a new run
    is_known: bool  # the directory has records of this run
    dependencies: Dependencies  # digests of files outside the checkpoints
    stop: StopRequest
    lock: RunLock  # held by rank 0
    guard: Guard  # its `close` also restores the signals and releases the lock


def open_run(config: RunConfig, recipe: Path | None, total_steps: int) -> OpenedRun:
    """Open `trainer.run_dir` (or a new directory named by rank 0) and choose the checkpoint to resume from; collective.

    Raises:
        UserError: the directory cannot be written, is in use, holds a run that is finished or must not be resumed, has
            no complete checkpoint, a dependency has changed, or the status page's address is taken; on every rank.
    """
    group, taken_over = world(), None
    name = f"{recipe.stem if recipe else 'run'}-{datetime.now():%Y%m%d-%H%M%S}"
    run_dir = Path(config.trainer.run_dir or share_object(f"checkpoints/runs/{name}", group))
    run_dir = run_dir.absolute()  # a user's function may change the working directory
    lock = RunLock(run_dir)
    with failing_together(group, _explain_unwritable):
        if group.rank() == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            taken_over = lock.acquire()
    try:
        return _open_locked(config, run_dir, total_steps, lock, taken_over)
    except BaseException:
        lock.release()
        raise


def _open_locked(
    config: RunConfig, run_dir: Path, total_steps: int, lock: RunLock, taken_over: str | None
) -> OpenedRun:
    group, run = world(), None
    with failing_together(group, _explain_unwritable):
        run = Run(run_dir, dump_yaml(config), total_steps, config.observability, group.rank())
    assert run is not None, "or its error was raised"
    if taken_over:
        run.log.warning("%s", taken_over)
    is_known, is_finished = share_object((has_records(run_dir), run.is_finished), group)
    if "otlp" in config.observability.trackers or config.observability.trace_steps:
        from megatron_rl.observability.spans import Spans

        session = share_object(uuid.uuid4().int, group)
        gather = partial(gather_objects, group=group)
        run.timers.trace(Spans(run_dir, config.observability, group.rank(), session, gather))
    checkpoint = choose_checkpoint(config.checkpoint.resume, run, is_known, group)
    if is_finished and (checkpoint is None or checkpoint.parent != run.checkpoints):
        raise _refuse(run_dir)
    if checkpoint is not None and total_steps:
        with failing_together(group):
            step = read_manifest(checkpoint).get("step", 0)
            if step > total_steps or (step == total_steps and is_finished):
                raise UserError(
                    f"the run has taken {step} steps, of {total_steps} requested",
                    source=str(checkpoint),
                    expected="steps that are left to take",
                    hint="raise trainer.total_steps (or total_epochs) to continue, or choose another trainer.run_dir",
                )
    dependencies = _find_dependencies(config, checkpoint, run, group)
    stop = StopRequest(run.log)

    def release() -> None:
        stop.close()
        lock.release()

    watchdog = None
    if group.size() > 1:
        from megatron_rl.run.watchdog import Watchdog, Watched

        watched = Watched(
            group.rank(),
            group.size(),
            run.timers,
            config.trainer.collective_timeout,
            run.log_file,
            run.log,
            lambda: stop.is_here,
            any_place=torch.cuda.is_available(),
            roles=config.placement.describe(group.size()),
        )
        watchdog = Watchdog(watched, open_store("watchdog", group))
    guard = Guard(group.rank(), run.timers, run.log_file, watchdog, release)
    return OpenedRun(run, checkpoint, is_known, dependencies, stop, lock, guard)


def _explain_unwritable(error: OSError) -> UserError:
    return UserError(
        f"cannot write the run directory: {error}",
        source="trainer.run_dir",
        expected="a directory on a disk that can be written",
        hint="free some space there, or choose another place",
    )


def _find_dependencies(config: RunConfig, checkpoint: Path | None, run: Run, group: dist.ProcessGroup) -> Dependencies:
    """Digest the run's dependencies on rank 0, and compare them with the checkpoint's, if any; collective."""

    def explain(error: OSError) -> UserError:
        return UserError(
            f"a file that the run depends on cannot be read: {error}",
            source=str(error.filename),
            expected="a file that can be read",
            hint="look at its permissions and its disk",
        )

    found: Dependencies = {}
    with failing_together(group, explain):
        if group.rank() == 0:
            found = find_dependencies(config)
            if checkpoint is not None:
                saved = read_manifest(checkpoint)["state"].get("dependencies", {})
                for line in check_dependencies(saved, found, config.checkpoint.allow_changes, checkpoint):
                    run.log.warning("changed since the checkpoint: %s", line)
    return share_object(found, group)


def choose_checkpoint(resume: str, run: Run, is_known: bool, group: dist.ProcessGroup) -> Path | None:
    """Return the checkpoint that `checkpoint.resume` selects; collective.

    The newest complete checkpoint of the run precedes a path elsewhere, so that a restarted job continues.

    Args:
        resume: auto, must, never or a path.
        is_known: the run directory holds metrics.

    Raises:
        UserError: a required checkpoint is missing; on every rank.
    """
    if resume == "never":
        if is_known:
            raise _refuse(run.dir)
        return None
    newest, skipped = find_newest_valid(run.checkpoints, group)
    for line in skipped:
        run.log.warning("checkpoint skipped, it is not whole: %s", line)
    if newest is None and skipped:
        raise UserError(
            f"none of the checkpoints is whole; the newest: {skipped[0]}",
            source=str(run.checkpoints),
            expected="one whole checkpoint",
            hint="restore one, or choose another trainer.run_dir to begin a new run",
        )
    if resume in ("auto", "must"):
        if newest is None and resume == "must":
            raise UserError(
                "there is no checkpoint",
                source=f"checkpoint.resume=must, {run.checkpoints}",
                expected="a run that was saved",
                hint="set checkpoint.resume=auto to begin one",
            )
        return newest
    path, root = find_step(Path(resume)), run.checkpoints.resolve()
    if newest is None:
        return path
    if path.is_relative_to(root) and path != newest.resolve():
        raise UserError(
            f"{path.name} is not the newest checkpoint of this run, {newest.name} is",
            source="checkpoint.resume",
            expected="the newest checkpoint, or one of another run",
            hint="remove the newer ones to go back in this run, or choose another trainer.run_dir",
        )
    return newest


def _refuse(run_dir: Path) -> UserError:
    return UserError(
        f"{run_dir / METRICS_FILE} already holds the metrics of a run",
        source="trainer.run_dir",
        expected="a new or empty run directory",
        hint="choose another trainer.run_dir, or remove this one",
    )
