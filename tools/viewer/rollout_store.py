# SPDX-License-Identifier: Apache-2.0
"""Rollouts of runs on disk, read a page at a time: `tools/view_rollouts.py` without `--out`.

A run writes one file per step, so nothing is indexed or loaded first: a page is read from a byte of a file on,
from the last step backwards, and a search goes through the files' bytes before any line is parsed. A place is the
number of a file in this order, and a byte.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.observability.metrics import VALIDATION, accuracy_set, has_records, read_metrics, step_of
from megatron_rl.types import UserError
from tools.viewer.rollout_page import CHUNK, RolloutIndex, bad_row, find_rollout_files, name_part, texts_of, tools_of

MOST_ROLLOUTS = 400  # of a page, unless a group is larger
_MOST_BYTES = 8 << 20  # of a page's lines
_SEARCH_SECONDS = 4.0  # of one answer; the reader may search on
_BLOCK = 1 << 20
_PLAIN = re.compile(r"[ !#-\[\]-~]+")


@dataclass(frozen=True)
class Part:
    """Rollouts of a run: of its training, or of one validation set."""

    name: str
    files: dict[int, Path]  # by step


@dataclass(frozen=True)
class Scope:
    """Choice of rollouts by a reader; by default the last ones of all parts.

    Attributes:
        part: index of a part; `None`: all.
        text, is_regex: in prompt, response, ground truth or an environment's texts, whatever the case.
        source, tool, prompt: names, and a prompt's id.
        place: of the first line that is read.
    """

    part: int | None = None
    first_step: int = 0
    last_step: int = 1 << 62
    text: str = ""
    is_regex: bool = False
    source: str = ""
    tool: str = ""
    prompt: str = ""
    place: tuple[int, int] = (0, 0)

    @property
    def is_search(self) -> bool:
        """Whether lines must be looked at one by one."""
        return bool(self.text or self.source or self.tool or self.prompt)


class RolloutStore:
    """Rollouts of several runs, with their validation sets.

    Raises:
        UserError: a directory has no rollouts.
    """

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        self.parts: list[Part] = []
        for run_dir in run_dirs:
            sets = sorted(path for path in (run_dir / VALIDATION).glob("*") if (path / "rollouts").is_dir())
            if (run_dir / "rollouts").is_dir() or not sets:
                self.parts.append(Part(name_part(run_dir), find_rollout_files(run_dir)))
            self.parts += [Part(name_part(path), find_rollout_files(path)) for path in sets]
        self.curves = [curve for run_dir in run_dirs for curve in _read_curves(run_dir)]
        self.num_rollouts: int | None = None  # once counted
        self._counting = threading.Thread(target=self._count, name="count of rollouts", daemon=True)
        self._counting.start()

    def list_files(self, scope: Scope) -> list[tuple[int, int, Path]]:
        """Return part, step and path of each file of a scope, the last step first."""
        found = [
            (number, step, path)
            for number, part in enumerate(self.parts)
            for step, path in part.files.items()
            if scope.part in (None, number) and scope.first_step <= step <= scope.last_step
        ]
        return sorted(found, key=lambda item: (-item[1], item[0]))

    def read(self, scope: Scope) -> dict[str, Any]:
        """Return a page of rollouts.

        Returns:
            `index` and `chunks` as in the page of `write_page`, `next` place or `None` at the end, `steps` with the
            last and the first step that was looked at, and the contents of the disk: `parts`, `curves`, `all_steps`,
            `num_rollouts` if counted.

        Raises:
            UserError: an invalid line, or an invalid regular expression.
        """
        files, (begin, offset) = self.list_files(scope), scope.place
        index, chunks, following = RolloutIndex([part.name for part in self.parts]), [[]], None
        deadline, num_bytes, last_group = time.monotonic() + _SEARCH_SECONDS, 0, None
        seen: list[int] = []
        for number in range(begin, len(files)):
            part, step, path = files[number]
            seen.append(step)
            for start, end, line in _find_lines(path, offset, scope, deadline):
                group = None
                if line is not None:
                    row = _parse(path, start, line)
                    group = row.get("prompt_id")
                    is_full = len(index.columns["step"]) >= MOST_ROLLOUTS or num_bytes >= _MOST_BYTES
                    if is_full and group != last_group:
                        following = number, start
                        break
                    if scope.is_search and not _fits(row, scope):
                        continue
                    num_bytes += len(line)
                    if len(chunks[-1]) == CHUNK:
                        chunks.append([])
                    chunks[-1].append(index.add(part, step, row, f"{path}, byte {start}"))
                    last_group = group
                elif time.monotonic() > deadline:
                    following = number, end
                    break
            offset = 0
            if following is not None:
                break
        steps = [step for part in self.parts for step in part.files]
        return {
            "index": index.finish(),
            "chunks": chunks,
            "next": following,
            "steps": [seen[0], seen[-1]] if seen else [],
            "parts": [part.name for part in self.parts],
            "curves": self.curves,
            "all_steps": [min(steps), max(steps), len(set(steps))],
            "num_rollouts": self.num_rollouts,
        }

    def _count(self) -> None:
        found = 0
        for part in self.parts:
            for path in part.files.values():
                with path.open("rb") as file:
                    while block := file.read(_BLOCK):
                        found += block.count(b"\n")
        self.num_rollouts = found

    def wait(self) -> int:
        """Return the number of rollouts, as soon as all are counted."""
        self._counting.join()
        assert self.num_rollouts is not None, "or the thread has failed"
        return self.num_rollouts


def _find_lines(path: Path, offset: int, scope: Scope, deadline: float) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield start, end and bytes of each line that may be in the scope; bytes `None` as soon as the time is over."""
    words = [scope.source, scope.tool, scope.prompt, "" if scope.is_regex else scope.text]
    # The longest part that has no escape in JSON: a line without it need not be parsed.
    wanted = max((x for word in words for x in _PLAIN.findall(word)), key=len, default="").lower().encode()
    with path.open("rb") as file:
        file.seek(offset)
        while block := file.read(_BLOCK):
            if scope.is_search and time.monotonic() > deadline:
                yield offset, offset, None
            block += file.readline()
            searched, start = block.lower() if wanted else block, 0
            while start < len(block):
                if wanted:
                    found = searched.find(wanted, start)
                    if found < 0:
                        break
                    start = searched.rfind(b"\n", start, found) + 1 or start
                end = block.find(b"\n", start)
                end = len(block) if end < 0 else end
                yield offset + start, offset + end, block[start:end]
                start = end + 1
            offset += len(block)


def _parse(path: Path, start: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise bad_row(f"{path}, byte {start}", f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise bad_row(f"{path}, byte {start}", f"a {type(row).__name__}")
    return row


def _fits(row: dict[str, Any], scope: Scope) -> bool:
    if scope.source and str(row.get("source")) != scope.source:
        return False
    if scope.prompt and str(row.get("prompt_id")) != scope.prompt:
        return False
    if scope.tool and scope.tool not in tools_of(row):
        return False
    texts = texts_of(row)
    if scope.is_regex:
        try:
            pattern = re.compile(scope.text, re.IGNORECASE)
        except re.error as error:
            raise UserError(
                f"{scope.text!r}: {error}", source="search", expected="a regular expression", hint="correct it"
            ) from error
        return any(pattern.search(text) for text in texts)
    return any(scope.text.lower() in text.lower() for text in texts)


def _read_curves(run_dir: Path) -> list[dict[str, Any]]:
    """Return the mean reward and the validation accuracies of a run by step."""
    records = read_metrics(run_dir) if has_records(run_dir) else []
    keys = sorted({key for record in records for key in record if key == "reward/mean" or accuracy_set(key)})
    return [
        {
            "name": f"{name_part(run_dir)}: {key}",
            "points": [(step_of(record), record[key]) for record in records if record.get(key) is not None],
        }
        for key in keys
    ]
