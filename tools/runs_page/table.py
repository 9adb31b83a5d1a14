# SPDX-License-Identifier: Apache-2.0
"""Table of the runs below a directory, from the ends of their files; a file is read again only when it has changed.

State of a run, from its directory:

    running    run.lock has had a heartbeat in the last 30 seconds
    finished   summary.json exists
    stopped    stopped.json exists: a signal ended it, and it can be resumed
    failed     none of these; the reason is the last error in logs/rank0.log
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq, gt, lt, ne
from pathlib import Path
from typing import Any

from megatron_rl.observability.metrics import (
    CONFIG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    accuracy_set,
    read_metrics,
    step_of,
)
from megatron_rl.observability.status import read_warnings
from megatron_rl.types import UserError
from tools.viewer.comparison import find_differences, read_settings

_TAIL_BYTES = 1 << 20  # of metrics.jsonl: about 400 steps
_SILENT_SECONDS = 30.0  # a lock has a heartbeat every five seconds
_DEEPEST = 3  # folders between the directory and a run
_LOG, _LOCK, _STOPPED = "logs/rank0.log", "run.lock", "stopped.json"
_LOSSES = ("sft/loss", "preference/loss")
COLUMNS = ("name", "state", "step", "steps", "validation", "best", "reward", "loss", "age")
_TERM = re.compile(r"([\w./@-]+)(!=|=|<|>)(.*)", re.DOTALL)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {"=": eq, "!=": ne, "<": lt, ">": gt}


@dataclass(frozen=True)
class Tail:
    """The end of a metrics.jsonl.

    Attributes:
        last: the last record, empty without one.
        courses: validation set -> last and best accuracy with their steps.
        is_whole: whether the file was read as a whole; otherwise `best` is that of the last steps.
    """

    last: Mapping[str, float | None] = field(default_factory=dict)
    courses: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    is_whole: bool = True


@dataclass(frozen=True)
class RunRow:
    """One run: its state and numbers, and the settings that most of the other runs have otherwise.

    Attributes:
        name: path below the table's directory.
        reason: why it has stopped or failed.
        steps: steps of the whole run, if the config has them.
        validation, best: accuracy on the first validation set; `courses` has all sets.
        is_best_exact: whether all validations were read.
        age: seconds since its last step.
    """

    name: str
    path: Path
    state: str
    reason: str
    step: int
    steps: int | None
    validation: float | None
    best: float | None
    is_best_exact: bool
    reward: float | None
    loss: float | None
    age: float
    courses: Mapping[str, Mapping[str, float]]
    settings: Mapping[str, Any]
    differences: Mapping[str, Any]


class RunTable:
    """The runs below a directory.

    Raises:
        UserError: there is no such directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        # File and its reader -> its time and size, and the result.
        self._known: dict[tuple[Path, Callable[[Path], Any]], tuple[tuple[int, int], Any]] = {}
        if not root.is_dir():
            raise UserError(
                f"there is no directory {root}",
                source="DIR",
                expected="a directory with runs in it, such as checkpoints/runs",
                hint="check the path",
            )

    def read(self) -> list[RunRow]:
        """Return all runs, by name."""
        folders = sorted(find_runs(self.root))
        settings = [self._load(path / CONFIG_FILE, _read_config) or {} for path in folders]
        usual = {
            key: Counter(map(str, values)).most_common(1)[0][0] for key, values in find_differences(settings).items()
        }
        return [
            self._describe(path, found, {k: found.get(k, "-") for k, v in usual.items() if str(found.get(k, "-")) != v})
            for path, found in zip(folders, settings, strict=True)
        ]

    def load_records(self, run_dir: Path) -> list[dict[str, float | None]]:
        """Return all records of a run (UserError: a line is no JSON)."""
        return self._load(run_dir / METRICS_FILE, _read_records) or []

    def _describe(self, path: Path, settings: Mapping[str, Any], differences: Mapping[str, Any]) -> RunRow:
        tail: Tail = self._load(path / METRICS_FILE, read_tail) or Tail()
        summary = self._load(path / SUMMARY_FILE, _read_json)
        courses, is_exact = tail.courses, tail.is_whole
        if summary is not None and not is_exact:
            courses, is_exact = (
                {name: {**courses.get(name, {}), **found} for name, found in _best_of(summary).items()},
                True,
            )
        state, reason = self._find_state(path, is_finished=summary is not None)
        first, last = next(iter(courses.values()), {}), tail.last
        steps = settings.get("trainer.total_steps")
        active = next((file for name in (METRICS_FILE, _LOG) if (file := path / name).exists()), path)
        return RunRow(
            name=str(path.relative_to(self.root)) if path != self.root else path.resolve().name,
            path=path,
            state=state,
            reason=reason,
            step=int(last.get("step") or 0),
            steps=steps if isinstance(steps, int) else None,
            validation=first.get("last"),
            best=first.get("best"),
            is_best_exact=is_exact,
            reward=last.get("reward/mean"),
            loss=next((last[key] for key in _LOSSES if key in last), None),
            age=max(0.0, time.time() - active.stat().st_mtime),
            courses=courses,
            settings=settings,
            differences=differences,
        )

    def _find_state(self, path: Path, is_finished: bool) -> tuple[str, str]:
        try:
            if time.time() - (path / _LOCK).stat().st_mtime < _SILENT_SECONDS:
                return "running", ""
        except OSError:
            pass  # no lock
        if is_finished:
            return "finished", ""
        stopped = self._load(path / _STOPPED, _read_json)
        if stopped is not None:
            return "stopped", f"{stopped.get('signal', 'a signal')} after step {stopped.get('step', '?')}"
        return "failed", self._load(path / _LOG, _find_error) or "it ended without a report"

    def _load(self, path: Path, read: Callable[[Path], Any]) -> Any:
        """Return `read(path)`, of the last call if the file has not changed since; `None` without the file."""
        try:
            found = path.stat()
        except OSError:
            self._known.pop((path, read), None)
            return None
        signature = found.st_mtime_ns, found.st_size
        known = self._known.get((path, read))
        if known is None or known[0] != signature:
            known = self._known[path, read] = signature, read(path)
        return known[1]


def find_runs(root: Path, deepest: int = _DEEPEST) -> list[Path]:
    """Return the directories of runs at or below `root`: those with metrics.jsonl or the log of rank 0."""
    try:
        entries = {entry.name: entry for entry in os.scandir(root)}
    except OSError:
        return []  # removed just now, or not readable
    if METRICS_FILE in entries or ("logs" in entries and (root / _LOG).exists()):
        return [root]
    folders = [entry for entry in entries.values() if deepest and entry.is_dir() and not entry.name.startswith(".")]
    return [run for entry in folders for run in find_runs(Path(entry), deepest - 1)]


def read_tail(path: Path) -> Tail:
    """Read the end of a metrics.jsonl; a last line that is not complete is left out."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().split(b"\n")
    lines, is_whole = lines[0 if size <= _TAIL_BYTES else 1 : -1], size <= _TAIL_BYTES
    courses: dict[str, dict[str, float]] = {}
    for line in lines:
        if b'"validation/' in line:
            record = json.loads(line)
            for key, value in record.items():
                is_validation = key.startswith("validation/")
                if is_validation and value is not None and (name := accuracy_set(key)) is not None:
                    course = courses.setdefault(name, {"best": -math.inf})
                    course |= {"last": value, "last_step": step_of(record)}
                    if value > course["best"]:
                        course |= {"best": value, "best_step": step_of(record)}
    return Tail(json.loads(lines[-1]) if lines else {}, courses, is_whole)


def _best_of(summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    names = ("last", "last_step", "best", "best_step")
    return {name: {key: course[key] for key in names} for name, course in summary.get("validation", {}).items()}


def _read_config(path: Path) -> dict[str, Any]:
    return read_settings(path.parent)


def _read_records(path: Path) -> list[dict[str, float | None]]:
    return read_metrics(path.parent)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}  # a file that a full disk has cut off


def _find_error(log: Path) -> str:
    found = [warning["text"] or "" for warning in read_warnings(log, most=20) if warning["level"] == "error"]
    return found[0].split("\n")[0] if found else ""


def select(rows: Sequence[RunRow], terms: Sequence[str] = (), order: str = "age") -> list[RunRow]:
    """Return the rows that fulfil all terms, sorted.

    Args:
        terms: texts in the name, the state or a difference; or KEY=VALUE, KEY!=VALUE, KEY<NUMBER, KEY>NUMBER. A key is
            a column or a setting, whose first words may be left out (lr is actor.lr).
        order: a key; "-KEY" is descending. Runs without a value are last.

    Raises:
        UserError: no run has the key.
    """
    for term in terms:
        match = _TERM.fullmatch(term)
        if match is None:
            rows = [row for row in rows if any(term in text for text in _texts(row))]
        else:
            key, sign, wanted = match.groups()
            values = [look_up(row, key) for row in rows]
            _check_known(rows, values, key, term)
            rows = [row for row, value in zip(rows, values, strict=True) if _fulfils(value, sign, wanted)]
    key = order.removeprefix("-")
    values = [look_up(row, key) for row in rows]
    _check_known(rows, values, key, order)
    is_known = [value is not None and value != "-" for value in values]
    numeric = all(isinstance(value, int | float) for value, known in zip(values, is_known, strict=True) if known)
    keyed = [(value if numeric else str(value), row) for value, row, known in zip(values, rows, is_known) if known]
    keyed.sort(key=lambda pair: pair[0], reverse=order.startswith("-"))
    return [row for _, row in keyed] + [row for row, known in zip(rows, is_known, strict=True) if not known]


def _texts(row: RunRow) -> list[str]:
    return [row.name, row.state, *(f"{key}={show_value(value)}" for key, value in row.differences.items())]


def show_value(value: Any) -> str:
    """Return the value of a setting as a recipe has it, without the quotes of texts."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def look_up(row: RunRow, key: str) -> Any:
    """Return a column or a setting of a run; "-" if it has neither."""
    if key in COLUMNS:
        return getattr(row, key)
    if key in row.settings:
        return row.settings[key]
    return next((value for name, value in row.settings.items() if name.endswith(f".{key}")), "-")


def _check_known(rows: Sequence[RunRow], values: Sequence[Any], key: str, given: str) -> None:
    if rows and key not in COLUMNS and all(value == "-" for value in values):
        raise UserError(
            f"no run has {key!r}",
            source=f"filter or order {given!r}",
            expected=f"one of {', '.join(COLUMNS)}, or a setting such as actor.lr",
            hint="check the spelling",
        )


def _fulfils(value: Any, sign: str, wanted: str) -> bool:
    try:
        return _COMPARE[sign](float(value), float(wanted))
    except (TypeError, ValueError):
        return sign in "!=" and _COMPARE[sign](show_value(value), wanted)
