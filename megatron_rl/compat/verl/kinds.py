# SPDX-License-Identifier: Apache-2.0
"""Kinds of translation for a verl setting name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Renamed:
    """A name for `target`. `values` maps (verl value, our value); if `closed`, other values are errors."""

    target: str
    values: tuple[tuple[Any, Any], ...] = ()
    closed: bool = False


@dataclass(frozen=True)
class Ignored:
    """A name without effect, and the reason."""

    reason: str


@dataclass(frozen=True)
class Only:
    """A name accepted only with values that match the fixed behavior (or null), and the reason."""

    allowed: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class SameAs:
    """A second name of `target`, accepted with the value of that setting; `strict`: with its default if not given."""

    target: str
    values: tuple[tuple[Any, Any], ...] = ()
    strict: bool = False


Alias = Renamed | Ignored | Only | SameAs
