# SPDX-License-Identifier: Apache-2.0
"""The lock of a run directory: one owner, a second job gets an error with its name, a dead owner's lock is taken over.

Locks with another machine's name imitate owners on other machines. Not covered: NFS itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_rl.run.opening import Owner, RunLock
from megatron_rl.types import UserError


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.run.opening._BEAT_SECONDS", 0.05)
    monkeypatch.setattr("megatron_rl.run.opening._DEAD_SECONDS", 1.0)


def write_lock(run_dir: Path, owner: Owner, age: float = 0.0) -> Path:
    path = run_dir / "run.lock"
    path.write_text(json.dumps(asdict(owner)))
    os.utime(path, (time.time() - age,) * 2)
    return path


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


ELSEWHERE = replace(Owner.here(), host="node7", machine="node7/other", token="theirs")


def test_the_second_job_is_refused_and_told_whose_it_is(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    assert first.acquire() is None
    content = first.path.read_bytes()
    with pytest.raises(
        UserError,
        match=rf"is in use: process {os.getpid()} on \S+ has held it for 0:00:\d\d, since 20"
        r".*; its last sign of life was 0 s ago(.|\n)*call its close\(\)",
    ):
        RunLock(tmp_path).acquire()
    assert first.path.read_bytes() == content
    first.release()
    first.release()
    assert list(tmp_path.iterdir()) == []
    assert RunLock(tmp_path).acquire() is None


@pytest.mark.parametrize(
    "owner,age,taken_over",
    [
        (replace(Owner.here(), pid=dead_pid()), 0.0, True),
        (
            replace(Owner.here(), started=Owner.here().started - 100),
            0.0,
            True,
        ),  # its number was given to another process
        (ELSEWHERE, 0.0, True),  # fresh, and no heartbeat while it is watched
        (ELSEWHERE, 100.0, True),
        (replace(Owner.here(), token="theirs"), 100.0, False),  # here it is a living process that counts
    ],
    ids=["process-gone", "number-reused", "silent", "long-silent", "alive"],
)
def test_who_is_dead(owner: Owner, age: float, taken_over: bool, tmp_path: Path) -> None:
    write_lock(tmp_path, owner, age)
    lock, began = RunLock(tmp_path), time.monotonic()
    if not taken_over:
        with pytest.raises(UserError, match="is in use"):
            lock.acquire()
        return
    assert lock.acquire() == f"{tmp_path} was held by {owner}, which is gone: its lock was taken over"
    assert (time.monotonic() - began > 0.9) == (owner is ELSEWHERE and age == 0.0)
    assert lock.lost is None
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_heartbeat_on_another_machine_is_seen(tmp_path: Path) -> None:
    path, end = write_lock(tmp_path, ELSEWHERE), threading.Event()

    def beat() -> None:
        while not end.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(UserError, match="process .* on node7 has held it(.|\n)*remove .*/run.lock"):
            RunLock(tmp_path).acquire()
    finally:
        end.set()
        thread.join()


def test_a_lock_that_was_cut_off_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.run.opening._DEAD_SECONDS", 0.3)
    (tmp_path / "run.lock").write_text('{"host": "no')
    assert "an unknown host" in RunLock(tmp_path).acquire()


def test_the_owner_notices_what_happens_to_its_lock(tmp_path: Path) -> None:
    """A file that was removed is made again; a job that took it over is named."""
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.path.unlink()
    wait_until(lock.path.exists)
    assert lock.lost is None
    write_lock(tmp_path, ELSEWHERE)
    wait_until(lambda: not lock._thread.is_alive())
    assert re.search("was taken over by process .* on node7", str(lock.lost))
    lock.release()
    assert json.loads(lock.path.read_text())["token"] == "theirs"


def _try(run_dir: Path, start: threading.Event, results: multiprocessing.Queue) -> None:
    lock = RunLock(run_dir)
    start.wait()
    try:
        results.put(lock.acquire() is not None)
    except UserError:
        results.put(None)
    time.sleep(1.0)


def test_of_many_that_find_a_dead_owner_one_takes_over(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for number in range(3):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        write_lock(run_dir, replace(Owner.here(), pid=dead_pid()))
        start, results = context.Event(), context.Queue()
        jobs = [context.Process(target=_try, args=(run_dir, start, results)) for _ in range(6)]
        for job in jobs:
            job.start()
        time.sleep(0.1)
        start.set()
        found = [results.get(timeout=20) for _ in jobs]
        assert sum(result is not None for result in found) == 1, found
        for job in jobs:
            job.join()


def test_an_unexpected_error_does_not_end_the_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """It is logged, and the heartbeat resumes once the cause is gone."""
    lock = RunLock(tmp_path)
    lock.acquire()
    with monkeypatch.context() as broken:
        broken.setattr(lock, "_read", lambda: 1 / 0)
        deadline = time.monotonic() + 30
        while "ZeroDivisionError" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "no heartbeat: ZeroDivisionError" in caplog.text
    os.utime(lock.path, (1, 1))
    while lock.path.stat().st_mtime == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lock.path.stat().st_mtime > 1
    assert lock.lost is None
    lock.release()
