# SPDX-License-Identifier: Apache-2.0
"""Rows that a program passes as an object instead of files, or that a function of the user returns.

    names = pass_rows("train", [{"prompt": "1+2=", "answer": "3"}])     # ["object:train?<digest>"]
    pin_function("my_rows.py:make", "data.train_files")                     # "object:my_rows.py:make?<digest>"
    read_rows(names)

A name stands where a file's path does. It holds a digest of the rows, so ranks or a resumed run with other rows are
noticed. Every rank keeps all rows in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.extension.registry import GYM, OBJECT
from megatron_rl.extension.user_code import call_function, find_function
from megatron_rl.types import UserError

_ROWS: dict[str, list[dict[str, Any]]] = {}
_MOST = 10_000_000  # rows; more are taken for an endless iterable


def pass_rows(name: str, data: Any) -> list[str]:
    """Register the rows of `data` and return their name as a list; of paths, return the paths.

    Args:
        name: of the set in metrics.
        data: rows (mappings with the columns of a file), texts (prompts), or paths: an iterable, a data set of torch,
            a DataFrame, or a function or class that returns one of these.

    Raises:
        UserError: no rows, too many, or something else than rows.
    """
    files = [data] if isinstance(data, str | Path) else data if isinstance(data, list | tuple) else []
    if files and all(isinstance(file, str | Path) and _is_path(str(file)) for file in files):
        return [str(file) for file in files]
    return [_register(name, data, "data" if name == "train" else f"validation ({name})")]


def pin_function(name: str, setting: str) -> str:
    """Return the name of a function or class, `path.py:name`, with a digest: of its file, or of the rows it returns.

    For rows it is called without arguments. `data.shuffle` and `data.curriculum.kind` have their file's digest.

    Raises:
        UserError: there is no such function, it fails, or it returns something else than rows.
    """
    source, function = f"{setting} = {name}", find_function(name, setting, "a function or class")
    if setting in ("data.shuffle", "data.curriculum.kind"):
        return f"{name}?{blake2b(Path(name.rpartition(':')[0]).read_bytes(), digest_size=12).hexdigest()}"
    return _register(name, function, source)


def _register(name: str, data: Any, source: str) -> str:
    data = call_function(data, source) if callable(data) else data
    if not isinstance(data, Iterable) and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        data = map(data.__getitem__, range(len(data)))  # a data set of torch
    if isinstance(data, Mapping | str | bytes) or not isinstance(data, Iterable):
        raise _refuse(f"{name} data that is a {type(data).__name__}", source, _advise(data))
    to_dict: Any = getattr(data, "to_dict", None) if type(data).__module__.startswith("pandas.") else None
    records = data if to_dict is None else to_dict("records")
    rows, whole = list[dict[str, Any]](), blake2b(digest_size=12)
    for number, row in enumerate(islice(records, _MOST + 1), start=1):
        columns = {"prompt": row} if isinstance(row, str) else row
        if not isinstance(columns, Mapping) or not all(isinstance(column, str) for column in columns):
            raise _refuse(f"row {number} is a {type(row).__name__}", source, "pass dicts with the columns of a file")
        rows.append(dict(columns))
        whole.update(json.dumps(rows[-1], sort_keys=True, default=_as_json).encode(errors="surrogatepass") + b"\n")
    if not 0 < len(rows) <= _MOST:
        found = f"more than {_MOST:,} rows" if rows else "no row"
        raise _refuse(f"{found} in the {name} data", source, "a generator yields its rows once: pass list(generator)")
    key = f"{OBJECT}{name}?{whole.hexdigest()}"
    _ROWS[key] = rows
    return key


def read_passed(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield location and columns of each row that was passed under this name (UserError if none was)."""
    setting, target = "data.train_files / data.validation_files", name.removeprefix(OBJECT).partition("?")[0]
    if name not in _ROWS and ".py:" in name and pin_function(target, setting) != name:
        raise UserError(
            f"{target} returns rows whose digest differs from the one in {name}",
            source=setting,
            expected="the rows of the run that wrote this name",
            hint=f"write {target} to use the rows of today",
        )
    if name not in _ROWS:
        raise UserError(
            f"{name} stands for rows that a program passed as an object",
            source=setting,
            expected="the program that passes them again",
            hint="run that program, or write the rows to a file (Dataset.to_parquet) and name it here",
        )
    for number, columns in enumerate(_ROWS[name], start=1):
        yield f"{target} data, row {number}", dict(columns)


def _is_path(text: str) -> bool:
    is_name = text.startswith((GYM, OBJECT)) or re.fullmatch(r"\S+\.py:\w+", text)
    return bool(is_name) or text.endswith((".jsonl", ".parquet")) or Path(text).is_file()


def _as_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _advise(data: Any) -> str:
    if isinstance(data, Mapping):
        split = next((name for name, part in data.items() if not isinstance(part, list | str)), None)
        return "pass datasets.Dataset.from_dict(data)" if split is None else f"pass one split, such as data[{split!r}]"
    return "pass [{'prompt': ..., 'answer': ...}, ...], a datasets.Dataset, or paths of files"


def _refuse(found: str, source: str, hint: str) -> UserError:
    expected = "a datasets.Dataset, a list of dicts or texts, another finite iterable of them, or paths of files"
    return UserError(found, source=source, expected=expected, hint=hint)
