# SPDX-License-Identifier: Apache-2.0
"""A conversion as units of work: one output file each, written by any process, never twice.

A finished unit leaves a note in `<output>.partial/.units/`: its file with digest, and what is in it. A conversion
that was interrupted continues with the units that have none. Notes count only for the same job: the same source
files and settings, as the *fingerprint* says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_rl.checkpoint.files import FileRecord, Unit, explain_os_error, write_file
from megatron_rl.checkpoint.torch_dist import Chunk
from megatron_rl.parallel.collectives import raise_together
from megatron_rl.types import UserError

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

_NOTES = ".units"


class Progress:
    """Where a process tells how far it is; nobody watches this one."""

    def begin(self, num_bytes: int) -> None:
        """There are so many bytes to write."""

    def advance(self, num_bytes: int) -> None:
        """So many more are written."""


class _Shared(Progress):
    """Adds up what the processes of a pool have written."""

    total: Synchronized[int]  # set in each of them when it starts: it can be inherited, not sent

    @classmethod
    def join(cls, total: Synchronized[int]) -> None:
        cls.total = total

    def advance(self, num_bytes: int) -> None:
        with self.total.get_lock():
            self.total.value += num_bytes


@dataclass(frozen=True)
class Finished:
    """A unit that is on the disk; `chunks` where it is a file of a distributed checkpoint."""

    record: FileRecord
    chunks: tuple[Chunk, ...] = ()


WriteUnit = Callable[[Unit, Path, Progress], Finished]


@dataclass(frozen=True)
class Workers:
    """Who shares the work.

    Attributes:
        group: all ranks under torchrun; None: this process is alone.
        processes: that a lone process starts (1: it does the work itself).
    """

    group: dist.ProcessGroup | None = None
    processes: int = 1

    @property
    def rank(self) -> int:
        """This process."""
        return self.group.rank() if self.group else 0

    @property
    def size(self) -> int:
        """Processes that take part from the start."""
        return self.group.size() if self.group else 1

    def agree(self, error: Exception | None) -> None:
        """Raise the error of any of them in all of them; collective."""
        if self.group:
            raise_together(error, self.group)
        elif error is not None:
            raise error


def run_units(
    units: Sequence[Unit],
    write: WriteUnit,
    partial: Path,
    fingerprint: Any,
    workers: Workers,
    progress: Progress | None,
) -> list[Finished]:
    """Do what is not done yet; returns all units, in order, on every rank.

    Args:
        units: of the whole job.
        write: makes one file in `partial`.
        partial: where files are written; made here.
        fingerprint: JSON that tells this job from others.
        workers: who shares the work.
        progress: of this process; None: nobody watches.

    Raises:
        UserError: a file cannot be written; on every rank. What is done stays for the next attempt.
    """
    workers.agree(_attempt(lambda: _prepare(partial, fingerprint) if workers.rank == 0 else None, partial))
    mine = [unit for unit in units[workers.rank :: workers.size] if _read_note(partial, unit) is None]
    progress = progress or Progress()
    progress.begin(sum(unit.num_bytes for unit in mine))
    workers.agree(_attempt(lambda: _write_all(mine, write, partial, workers.processes, progress), partial))
    finished = [note for unit in units if (note := _read_note(partial, unit)) is not None]
    assert len(finished) == len(units), "every unit left its note"
    workers.agree(None)  # the first process renames the directory next: until here all read in it
    return finished


def forget_notes(out: Path) -> None:
    """Remove the notes of a job whose output has its name."""
    shutil.rmtree(out / _NOTES)


def _attempt(action: Callable[[], None], partial: Path) -> UserError | None:
    try:
        action()
    except UserError as error:
        return error
    except OSError as error:
        return explain_os_error(error, partial)
    return None


def _prepare(partial: Path, fingerprint: Any) -> None:
    """Make the directory; one of another job goes away first."""
    job, text = partial / _NOTES / "job.json", json.dumps(fingerprint, sort_keys=True)
    if not job.is_file() or job.read_text(encoding="utf-8") != text:
        if partial.exists():
            shutil.rmtree(partial)
        (partial / _NOTES).mkdir(parents=True)
        write_file(job, text.encode())


def _write_all(units: Sequence[Unit], write: WriteUnit, partial: Path, processes: int, progress: Progress) -> None:
    if processes == 1:
        for unit in units:
            _write_one(unit, write, partial, progress)
        return
    context, told = get_context("fork"), 0
    total = context.Value("q", 0)
    with ProcessPoolExecutor(processes, context, initializer=_Shared.join, initargs=(total,)) as pool:
        pending = {pool.submit(_write_one, unit, write, partial, _Shared()) for unit in units}
        while pending:
            done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            told, before = total.get_obj().value, told  # without the lock, which a killed process may hold
            progress.advance(told - before)
            for future in done:
                if future.exception() is not None:
                    pool.shutdown(cancel_futures=True)
                try:
                    future.result()
                except BrokenProcessPool:
                    raise UserError(
                        "a process of the conversion was killed",
                        source=f"--processes {processes}",
                        expected="processes that live",
                        hint="if it was for lack of memory, use fewer of them; what is "
                        "finished is kept, and the same command continues from there",
                    ) from None


def _write_one(unit: Unit, write: WriteUnit, partial: Path, progress: Progress) -> None:
    finished = write(unit, partial / unit.file, progress)
    note = asdict(finished) | {"record": [finished.record.num_bytes, finished.record.digest]}
    temporary = partial / _NOTES / f"{unit.file}.new"
    write_file(temporary, json.dumps(note).encode())
    temporary.replace(_note_path(partial, unit))


def _note_path(partial: Path, unit: Unit) -> Path:
    return partial / _NOTES / f"{unit.file}.json"


def _read_note(partial: Path, unit: Unit) -> Finished | None:
    """What a unit left behind; None if it is not finished."""
    path, file = _note_path(partial, unit), partial / unit.file
    if not path.is_file() or not file.is_file():
        return None
    note = json.loads(path.read_text(encoding="utf-8"))
    num_bytes, digest = note["record"]
    if file.stat().st_size != num_bytes:
        return None
    chunks = (
        Chunk(**row | {"shape": tuple(row["shape"]), "box": tuple(map(tuple, row["box"]))}) for row in note["chunks"]
    )
    return Finished(FileRecord(file, num_bytes, digest), tuple(chunks))
