# SPDX-License-Identifier: Apache-2.0
"""What a name of verl's can be here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Renamed:
    """Another name for `target`. `values` maps (verl value, our value); with `closed`, no other value is known."""

    target: str
    values: tuple[tuple[Any, Any], ...] = ()
    closed: bool = False


@dataclass(frozen=True)
class Ignored:
    """A name without a meaning here, and why; a value of null is no news."""

    reason: str


@dataclass(frozen=True)
class Only:
    """A name that is accepted with the values that mean what is done anyway (null always does), and why."""

    allowed: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class SameAs:
    """A second name of `target`, accepted with the value of that setting; `strict`: with its default if not given."""

    target: str
    values: tuple[tuple[Any, Any], ...] = ()
    strict: bool = False


Alias = Renamed | Ignored | Only | SameAs
