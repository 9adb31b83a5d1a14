# SPDX-License-Identifier: Apache-2.0
"""Units of work of a conversion: one output file each, written once by any process.

A finished unit leaves a note (file digest and contents) in `<output>.partial/.units/`; a resumed conversion writes only
units without one. Notes are valid for equal source files and settings, the *fingerprint*.
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
    """A progress sink that ignores reports."""

    def begin(self, num_bytes: int) -> None:
        """Set the total."""

    def advance(self, num_bytes: int) -> None:
        """Add written bytes."""


class _Shared(Progress):
    """A sum of the bytes written by a pool."""

    total: Synchronized[int]  # set at process start: inherited, since it cannot be pickled

    @classmethod
    def join(cls, total: Synchronized[int]) -> None:
        cls.total = total

    def advance(self, num_bytes: int) -> None:
        with self.total.get_lock():
            self.total.value += num_bytes


@dataclass(frozen=True)
class Finished:
    """A written unit; `chunks` if it is a file of a distributed checkpoint."""

    record: FileRecord
    chunks: tuple[Chunk, ...] = ()


WriteUnit = Callable[[Unit, Path, Progress], Finished]


@dataclass(frozen=True)
class Workers:
    """The processes that share the work.

    Attributes:
        group: all ranks under torchrun; `None` for a single process.
        processes: started by a single process; with 1 it works itself.
    """

    group: dist.ProcessGroup | None = None
    processes: int = 1

    @property
    def rank(self) -> int:
        """Return this process's rank."""
        return self.group.rank() if self.group else 0

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.group.size() if self.group else 1

    def agree(self, error: Exception | None) -> None:
        """Raise any rank's error on all ranks; collective."""
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
    """Write missing units; return all units, in order, on every rank.

    Args:
        write: makes one file in `partial`.
        fingerprint: JSON that identifies the job.

    Raises:
        UserError: a file cannot be written; on every rank. Finished units remain for the next attempt.
    """
    workers.agree(_attempt(lambda: _prepare(partial, fingerprint) if workers.rank == 0 else None, partial))
    mine = [unit for unit in units[workers.rank :: workers.size] if _read_note(partial, unit) is None]
    progress = progress or Progress()
    progress.begin(sum(unit.num_bytes for unit in mine))
    workers.agree(_attempt(lambda: _write_all(mine, write, partial, workers.processes, progress), partial))
    finished = [note for unit in units if (note := _read_note(partial, unit)) is not None]
    assert len(finished) == len(units), "every unit left its note"
    workers.agree(None)  # rank 0 renames the directory next: wait for all readers
    return finished


def forget_notes(out: Path) -> None:
    """Remove the notes of a finished output."""
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
    """Make the directory; replace one with another fingerprint."""
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
            told, before = total.get_obj().value, told  # lock-free: a killed process may hold the lock
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
    """Return a finished unit, or `None`."""
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
