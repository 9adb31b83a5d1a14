# SPDX-License-Identifier: Apache-2.0
"""Kinds of translation of another project's setting names: one by one, or in groups that depend on each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from megatron_rl.config.fields import read_number
from megatron_rl.config.sources import ASSUMED, Setting, describe
from megatron_rl.types import UserError

Meaning = TypeVar("Meaning")
Parts = dict[str, Setting]
Combined = Iterator[Setting | str]  # translated settings and notes


@dataclass(frozen=True)
class Renamed:
    """A foreign name of our setting `target`.

    `values` maps (verl value, our value); other values are kept, or errors if `closed`.
    """

    target: str
    values: tuple[tuple[Any, Any], ...] = ()
    closed: bool = False


@dataclass(frozen=True)
class Ignored:
    """A foreign name that is accepted without effect, and the reason."""

    reason: str


@dataclass(frozen=True)
class Only:
    """A foreign name accepted only with values that match the fixed behavior here (or null), and the reason."""

    allowed: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class SameAs:
    """A second foreign name of our setting `target`, accepted only with the value that `target` has.

    If the recipe does not set `target`, any value is accepted without effect, or only the default if `strict`.
    """

    target: str
    values: tuple[tuple[Any, Any], ...] = ()
    strict: bool = False


Alias = Renamed | Ignored | Only | SameAs


def each(names: str, meaning: Meaning) -> dict[str, Meaning]:
    """Return a table that gives several names, separated by spaces in `names`, the same meaning."""
    return dict.fromkeys(names.split(), meaning)


@dataclass(frozen=True)
class AliasGroup:
    """Foreign names that are translated together, because their meanings depend on each other."""

    names: tuple[str, ...]
    meaning: str  # resulting settings, for `--help` and docs
    combine: Callable[[Parts], Combined]  # translates those that were given
    reads: tuple[str, ...] = ()  # further names that `combine` reads; they keep their own meaning
    targets: Mapping[str, str] = field(default_factory=dict)  # name -> equivalent setting, for flags without a value


def assume(settings: dict[str, Setting], name: str, value: Any) -> None:
    """Add a default of another project unless the setting is given; `~` is the user's home."""
    value = os.path.expanduser(value) if isinstance(value, str) else value
    settings.setdefault(name, Setting(name, value, "verl's default", ASSUMED))


def put(setting: Setting, target: str, value: Any, *, layer: int | None = None, weak: bool = False) -> Setting:
    """Return `setting` renamed to `target` with another value; errors still name its place in the recipe.

    For `layer` and `weak`, see `Setting`.
    """
    layer = setting.layer if layer is None else layer
    return replace(setting, name=target, value=value, layer=layer, text=None, weak=weak)


def same(value: Any, other: Any) -> bool:
    """Whether two values are equal, where a boolean equals no number, and the text 1e-8 the number."""
    return isinstance(value, bool) == isinstance(other, bool) and (value == other or read_number(value) == other)


def look_up(setting: Setting, target: str, values: Collection[tuple[Any, Any]], hint: str) -> Setting:
    """Translate a setting to `target` by a table of all accepted values (UserError for others)."""
    for theirs, ours in values:
        if same(setting.value, theirs):
            return put(setting, target, ours)
    raise UserError(
        f"{setting.name} = {setting.value!r} is not known",
        source=setting.source,
        expected=f"one of {', '.join(repr(theirs) for theirs, _ in values)}: there is no {target} {setting.value!r}",
        hint=hint,
    )


def read_boolean(setting: Setting) -> bool:
    """Return the value of a switch; null is false (UserError if not boolean)."""
    if setting.value is None or isinstance(setting.value, bool):
        return bool(setting.value)
    raise UserError(
        f"{setting.name} = {setting.value!r} is not accepted",
        source=setting.source,
        expected="true or false",
        hint=f"write {setting.name}=true",
    )


def note(setting: Setting, reason: str) -> str:
    """Format the note for a setting without effect; nothing for a default that nobody wrote."""
    return "" if setting.layer == ASSUMED else f"ignored: {describe(setting)}, {reason}"


def move(earlier: str, target: str, change: Callable[[Setting, Any], Any], default: Any = None) -> AliasGroup:
    """Build the translation of settings of earlier versions that are parts of the value of `target` now.

    Args:
        earlier: names, separated by spaces.
        change: (a part that is not null, the value of `target` or `default`) -> the value of `target`.
    """

    def combine(parts: Parts) -> Combined:
        found = parts.get(target)
        for given in (parts[name] for name in earlier.split() if name in parts):
            if given.value is not None and (found is None or found.layer <= given.layer):
                value = default if found is None or found.value is None else found.value
                found = put(given, target, change(given, value))
        if found is not None:
            yield found

    return AliasGroup((target, *earlier.split()), target, combine, targets={target: target})
