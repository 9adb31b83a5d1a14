# SPDX-License-Identifier: Apache-2.0
"""Registries of named functions that users extend."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_rl.types import UserError

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Deferred:
    """A function or class of the package, imported when called."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        """Import it and call it."""
        return getattr(importlib.import_module(self.module), self.name)(*args)


def add_entry(table: dict[str, Entry], name: str, entry: Entry, function: Callable[..., Any], setting: str) -> None:
    """Add an entry under a free name (UserError if taken).

    Args:
        function: its file and line are in the error.
    """
    if name in table:
        raise UserError(
            f'"{name}" is registered already',
            source=describe_place(function),
            expected=f"a name other than {', '.join(sorted(table))}",
            hint=f"choose another name and set {setting} to it",
        )
    table[name] = entry


def enter_object(table: dict[str, Entry], entry: Entry, function: Callable[..., Any], setting: str) -> str:
    """Return an entry's name; add it under the function's name if new (UserError if taken)."""
    for name, known in table.items():
        if known == entry:
            return name
    name = name_of(function)
    add_entry(table, name, entry, function, setting)
    return name


def name_of(function: Any) -> str:
    """Return the name of a function, or a callable's class."""
    return getattr(inspect.unwrap(function), "__name__", type(function).__name__)


def find_entry(table: dict[str, Entry], name: str, setting: str, place: str | None = None) -> Entry:
    """Return the entry that `setting`, at `place`, names (UserError if unknown)."""
    if name not in table:
        close = difflib.get_close_matches(name, table, n=1)
        meant = f'did you mean "{close[0]}"? ' if close else ""
        raise UserError(
            f'{setting} = "{name}" is not known',
            source=f"{setting} ({place})" if place else setting,
            expected=", ".join(sorted(table)),
            hint=f"{meant}one of yours needs its file in algorithm.plugins",
        )
    return table[name]


def describe_place(function: Callable[..., Any]) -> str:
    """Return file:line of a function's definition."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
