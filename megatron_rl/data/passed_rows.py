# SPDX-License-Identifier: Apache-2.0
"""Rows that a program passes as an object instead of files: a `datasets.Dataset`, dicts, texts, a DataFrame.

    names = pass_rows("train", [{"prompt": "1+2=", "answer": "3"}])     # ["object:train?<digest>"]
    read_rows(names)

A name stands where a file's path does. It holds a digest of the rows, so ranks or a resumed run with other rows are
noticed. Every rank keeps all rows in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.extension.registry import GYM, OBJECT
from megatron_rl.types import UserError

_ROWS: dict[str, list[dict[str, Any]]] = {}
_MOST = 10_000_000  # rows; more are taken for an endless iterable


def pass_rows(name: str, data: Any) -> list[str]:
    """Register the rows of `data` and return their name as a list; of paths, return the paths.

    Args:
        name: of the set in metrics.
        data: an iterable of rows (mappings with the columns of a file), of texts (prompts), or of paths; a DataFrame.

    Raises:
        UserError: no rows, too many, or something else than rows.
    """
    files = [data] if isinstance(data, str | Path) else data if isinstance(data, list | tuple) else []
    if files and all(isinstance(file, str | Path) and _is_path(str(file)) for file in files):
        return [str(file) for file in files]
    if isinstance(data, Mapping | str | bytes) or not isinstance(data, Iterable):
        raise _refuse(f"{name} data that is a {type(data).__name__}", name, _advise(data))
    to_dict: Any = getattr(data, "to_dict", None) if type(data).__module__.startswith("pandas.") else None
    records = data if to_dict is None else to_dict("records")
    rows, whole = list[dict[str, Any]](), blake2b(digest_size=12)
    for number, row in enumerate(islice(records, _MOST + 1), start=1):
        columns = {"prompt": row} if isinstance(row, str) else row
        if not isinstance(columns, Mapping) or not all(isinstance(column, str) for column in columns):
            raise _refuse(f"row {number} is a {type(row).__name__}", name, "pass dicts with the columns of a data file")
        rows.append(dict(columns))
        whole.update(json.dumps(rows[-1], sort_keys=True, default=_as_json).encode(errors="surrogatepass") + b"\n")
    if not 0 < len(rows) <= _MOST:
        found = f"more than {_MOST:,} rows" if rows else "no row"
        raise _refuse(f"{found} in the {name} data", name, "a generator yields its rows once: pass list(generator)")
    key = f"{OBJECT}{name}?{whole.hexdigest()}"
    _ROWS[key] = rows
    return [key]


def read_passed(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield location and columns of each row that was passed under this name (UserError if none was)."""
    if name not in _ROWS:
        raise UserError(
            f"{name} stands for rows that a program passed as an object",
            source="data.train_files / data.validation_files",
            expected="the program that passes them again",
            hint="run that program, or write the rows to a file (Dataset.to_parquet) and name it here",
        )
    for number, columns in enumerate(_ROWS[name], start=1):
        yield f"{name.partition('?')[0].removeprefix(OBJECT)} data, row {number}", dict(columns)


def _is_path(text: str) -> bool:
    return text.endswith((".jsonl", ".parquet")) or text.startswith((GYM, OBJECT)) or Path(text).is_file()


def _as_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _advise(data: Any) -> str:
    if isinstance(data, Mapping):
        split = next((name for name, part in data.items() if not isinstance(part, list | str)), None)
        return "pass datasets.Dataset.from_dict(data)" if split is None else f"pass one split, such as data[{split!r}]"
    return "pass [{'prompt': ..., 'answer': ...}, ...], a datasets.Dataset, or paths of files"


def _refuse(found: str, name: str, hint: str) -> UserError:
    source = "data" if name == "train" else f"validation ({name})"
    expected = "a datasets.Dataset, a list of dicts or texts, another finite iterable of them, or paths of files"
    return UserError(found, source=source, expected=expected, hint=hint)
