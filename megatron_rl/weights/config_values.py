# SPDX-License-Identifier: Apache-2.0
"""Untrusted JSON files of a model: reading, and type checks."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.types import UserError

_LARGEST = 1 << 31  # far above any size of a model
_SMALLEST = 1e-12  # products of numbers outside [this, its inverse] may overflow float32


def _is_count(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value < _LARGEST


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and _SMALLEST <= value <= 1 / _SMALLEST


def _is_list_of(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(holds, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


# Kind, as in error messages -> predicate.
KINDS: dict[str, Callable[[Any], bool]] = {
    "a whole number above 0": _is_count,
    "a whole number above 1": lambda value: _is_count(value, 2),
    "a whole number, 0 or more": lambda value: _is_count(value, 0),
    "a number from 1e-12 to 1e12": _is_positive,
    "0, or a number from 1e-12 to 1e12": lambda value: value == 0 or _is_positive(value),
    "a share of 1, above 0": lambda value: _is_positive(value) and value <= 1,
    "true or false": lambda value: isinstance(value, bool),
    "a text": _is_text,
    "a list of texts": lambda value: _is_list_of(value, _is_text),
    "a list of whole numbers": lambda value: _is_list_of(value, lambda item: _is_count(item, 0)),
    "a list of numbers above 0": lambda value: bool(value) and _is_list_of(value, _is_positive),
    "an object": lambda value: isinstance(value, dict),
}
COUNT, TWO, COUNT_OR_ZERO, POSITIVE, NOT_NEGATIVE, SHARE, FLAG, TEXT, TEXTS, COUNTS, NUMBERS, OBJECT = KINDS


def read_json(file: Path, hint: str) -> dict[str, Any]:
    """Return the JSON object in a file; UserError if there is none."""
    try:
        content = json.loads(file.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{file} holds no JSON object: {error}", source=str(file), expected=f"the {file.name} of a model", hint=hint
        ) from None
    return content


def check_kinds(values: Mapping[str, Any], kinds: Mapping[str, str], source: str, *, may_be_null: bool = True) -> None:
    """Refuse the first value that is not of its kind (UserError); missing keys pass.

    Args:
        kinds: key -> one of `KINDS`.
    """
    for name, kind in kinds.items():
        value = values.get(name)
        if name in values and not (value is None and may_be_null) and not KINDS[kind](value):
            raise UserError(
                f"{name} = {show(value)}",
                source=source,
                expected=kind + (f", below {_LARGEST:,}" if type(value) is int and value >= _LARGEST else ""),
                hint=f"correct {name}, or take the file from the model again",
            )


def show(value: Any) -> str:
    """Format a value of any size as a short line."""
    return reprlib.repr(value)
