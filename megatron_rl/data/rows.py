# SPDX-License-Identifier: Apache-2.0
"""Reads and checks rows of JSONL and parquet files, each with its location for errors.

Parquet is streamed by `datasets`; JSONL is decoded line by line, so that types are kept and errors can quote a line.

Invariants: rows keep the order of the files; blank lines are skipped; accessors of `Row` return checked values or raise
a UserError with file and line.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatron_rl.extension.registry import GYM, HUB, OBJECT
from megatron_rl.types import UserError

_LONGEST_EXCERPT = 120


@dataclass(frozen=True)
class Row:
    """One row of a data file."""

    index: int  # over all files, from 0
    file: int  # index of its file, from 0
    location: str  # "file:line" (JSONL) or "file:row N" (parquet), from 1
    columns: dict[str, Any]

    def scalar_text(self, column: str) -> str:
        """Return a text or number column as text."""
        return as_text(self.require(column), column, self.location)

    def require(self, column: str) -> Any:
        """Return the value of a column (UserError if it is missing or null)."""
        if self.columns.get(column) is None:
            state = "is null" if column in self.columns else "is missing"
            raise UserError(
                f'column "{column}" {state}; the row has {", ".join(sorted(self.columns)) or "no columns"}',
                source=self.location,
                expected=f'a row with the column "{column}"',
                hint="set data.prompt_key or data.answer_key, or correct the row",
            )
        return self.columns[column]

    def optional(self, column: str, kind: type, default: Any) -> Any:
        """Return a column of type `kind`, or `default` if it is missing or null."""
        value = self.columns.get(column)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise wrong_type(column, value, self.location, f"a value of type {kind.__name__}")
        return value


def as_text(value: Any, column: str, location: str) -> str:
    """Return a text, or a finite number as Python prints it (UserError otherwise)."""
    if isinstance(value, str):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise wrong_type(column, value, location, "a text or a finite number")
    return str(value)


def wrong_type(column: str, value: Any, location: str, expected: str) -> UserError:
    """Return the error for a column's value of a wrong type."""
    return UserError(
        f'column "{column}" holds {excerpt(repr(value))} ({type(value).__name__})',
        source=location,
        expected=expected,
        hint="correct this row, or write lists and objects as JSON text",
    )


def excerpt(text: str) -> str:
    """Cut a text to fit an error message."""
    return text if len(text) <= _LONGEST_EXCERPT else text[:_LONGEST_EXCERPT] + f"... ({len(text)} characters)"


def read_rows(files: list[str]) -> Iterator[Row]:
    """Yield all rows of all files, in order.

    Args:
        files: .jsonl and .parquet paths, or data sets of reasoning-gym or the hub.

    Raises:
        UserError: no files, a missing, empty or unsupported file, or a malformed row.
    """
    if not files:
        raise UserError(
            "no data files are given",
            source="data.train_files / data.validation_files",
            expected="at least one .jsonl or .parquet file",
            hint="list the files in the recipe",
        )
    index = 0
    for file, name in enumerate(files):
        first = index
        for location, columns in _open(name):
            yield Row(index, file, location, columns)
            index += 1
        if index == first:
            raise UserError(
                f"{name}: the file holds no rows",
                source=name,
                expected="at least one row",
                hint="remove the file from the list, or write it again",
            )


def _open(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if name.startswith(GYM):
        from megatron_rl.extension.reasoning_gym import read_reasoning_gym

        return read_reasoning_gym(name)
    if name.startswith(HUB):
        from megatron_rl.data.hub import read_dataset

        return read_dataset(name)
    if name.startswith(OBJECT):
        from megatron_rl.data.passed_rows import read_passed

        return read_passed(name)
    path, readers = Path(name), {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if not path.is_file():
        state = "is not a file" if path.exists() else "does not exist"
        raise UserError(
            f"{path} {state}",
            source="data.train_files / data.validation_files",
            expected="a .jsonl or .parquet file",
            hint="list the files, [A, B]: a pattern may match other files on other hosts"
            if set(name) & set("*?[,")
            else f"check the path; a data set of the hub is {HUB}OWNER/NAME[/CONFIG]:SPLIT",
        )
    if path.suffix not in readers:
        raise UserError(
            f'{path}: the extension "{path.suffix}" is not known',
            source=str(path),
            expected=".jsonl (one JSON object per line) or .parquet",
            hint="convert the file, or rename it if only the extension is off",
        )
    return readers[path.suffix](path)


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:  # bytes: text mode would also split lines at characters inside a string
        for number, line in enumerate(file, start=1):
            if line.strip():
                location = f"{path}:{number}"
                yield location, _parse_line(line, location)


def _parse_line(line: bytes, location: str) -> dict[str, Any]:
    shown = excerpt(line.decode("utf-8", errors="backslashreplace").strip())
    hint = "correct or remove this line"
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"the line is not valid JSON ({error}): {shown}",
            source=location,
            expected="one JSON object per line, UTF-8",
            hint=hint,
        ) from error
    if not isinstance(value, dict):
        raise UserError(
            f"the line holds a {type(value).__name__}, not an object: {shown}",
            source=location,
            expected="one JSON object per line",
            hint=hint,
        )
    if b"\\ud" in line.lower():  # a surrogate can only come from an escape
        for name, held in value.items():
            try:
                json.dumps([name, held], ensure_ascii=False).encode()
            except UnicodeEncodeError as error:  # tokenizers and later writes fail likewise
                code = error.object[error.start].encode("ascii", "backslashreplace").decode()
                raise UserError(
                    f"column {json.dumps(name)} holds {code}, half of a character (a lone surrogate): {shown}",
                    source=location,
                    expected="whole characters",
                    hint="remove it, or write the file again from texts that were not cut inside of a character",
                ) from None
    return value


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets  # a slow import, not needed with JSONL

    # The library locks a file in its cache even when streaming; separate directories keep ranks apart.
    with tempfile.TemporaryDirectory(prefix="megatron_rl_datasets_") as cache_dir:
        try:
            # The default batch size is the first row group, which may be empty.
            stream = datasets.Dataset.from_parquet(str(path), cache_dir=cache_dir, streaming=True, batch_size=1024)
            for number, columns in enumerate(stream, start=1):
                yield f"{path}:row {number}", cast(dict[str, Any], columns)
        except Exception as error:  # pyarrow and datasets raise many types for a broken file
            first_line = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"the file cannot be read as parquet: {type(error).__name__}: {excerpt(first_line)}",
                source=str(path),
                expected="a parquet file",
                hint="write the file again",
            ) from error
