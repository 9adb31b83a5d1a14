# SPDX-License-Identifier: Apache-2.0
"""A config under examination: values by full name, and all of its mistakes, each with the place of the value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from types import FunctionType
from typing import Any

from megatron_rl.config.algorithm import OPTIONS
from megatron_rl.config.fields import PREFIX, SOURCES, render
from megatron_rl.config.schema import RunConfig
from megatron_rl.extension.registry import ENGINES, name_engines
from megatron_rl.types import UserError, UserErrors


@dataclass(frozen=True)
class Mistakes:
    """Errors found so far, and names of invalid settings, whose dependent rules are skipped."""

    errors: list[UserError] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    @contextmanager
    def collect(self, *names: str) -> Iterator[None]:
        """Record a UserError raised in the `with` block, which ends there, and mark the settings `names` as invalid."""
        try:
            yield
        except UserError as error:
            self.errors.append(error)
            self.refused.update(names)

    def raise_all(self) -> None:
        """Raise all errors as one UserError, if there are any."""
        errors = list({str(error): error for error in self.errors}.values())
        if errors:
            raise errors[0] if len(errors) == 1 else UserErrors(errors)


class _Unknown(Exception):
    """Raised when a rule reads an invalid setting."""


@dataclass(frozen=True)
class CheckedConfig:
    """A config whose values are read by full name, with the origin of each value.

    Attributes:
        titles: full name -> the setting that gives its value in a config of `RunConfig.by_source`.
    """

    config: RunConfig
    sources: Mapping[str, str] = field(default_factory=dict)
    mistakes: Mistakes = field(default_factory=Mistakes)
    titles: Mapping[str, str] = field(default_factory=dict)

    def apply(self, rule: Callable[..., None], *args: Any) -> None:
        """Call `rule(self, *args)`; the rule ends early, without an error, when it reads an invalid setting."""
        with suppress(_Unknown):
            rule(self, *args)

    def get(self, name: str) -> Any:
        """Return the value of "section.name", which may be a derived property of the section."""
        section, _, leaf = name.partition(".")
        if section == "teachers":
            teacher, _, leaf = leaf.partition(".")
            section = f"teachers.{teacher}"
        elif name.startswith(f"{SOURCES}."):
            source, _, leaf = leaf.removeprefix("sources.").partition(".")
            section = f"{SOURCES}.{source}"
        elif leaf.startswith("further."):
            section, _, leaf = name.rpartition(".")
        owner, refused = self.config.section(section), self.mistakes.refused
        if name.startswith(f"{PREFIX}."):
            plugin, _, leaf = leaf.partition(".")[2].partition(".")
            owner = owner.options[plugin] if plugin in owner.options else OPTIONS[plugin]()
        read = {name}
        if refused and isinstance(getattr(type(owner), leaf, None), property | cached_property | FunctionType):
            # A property or method may read any setting of the class that declares it.
            declaring = next(one for one in type(owner).__mro__ if leaf in vars(one))
            read |= {f"{section}.{item.name}" for item in fields(declaring)}
        if refused & {self.titles.get(one, one) for one in read}:
            raise _Unknown
        if section.startswith(f"{SOURCES}.") and not hasattr(owner, leaf):
            return owner.own.get(leaf)
        return attrgetter(leaf)(owner)

    def supports(self, ability: str) -> bool:
        """Return whether the configured engine has an ability, one of `extension.registry.ABILITIES`."""
        return ENGINES[self.get("rollout.engine")].has(ability)

    def require(self, holds: bool, name: str, why: str, *, expected: str, hint: str) -> bool:
        """Record a mistake in the setting `name` unless `holds`; return `holds`.

        Args:
            why: end of the error, after "name = value".
        """
        if not holds:
            value, name = self.get(name), self.titles.get(name, name)
            place = self.sources.get(name)
            source = f"{name} ({place})" if place else name
            found = f"{name} = {value!r} {why}"
            self.mistakes.errors.append(UserError(found, source=source, expected=expected, hint=hint))
        return holds

    def allow(self, name: str, value: Any, why: str, otherwise: str) -> None:
        """Record a mistake unless the setting `name` has `value`, the only one that works.

        Args:
            otherwise: alternative to setting `value`, for the hint.
        """
        text = render(value)
        self.require(self.get(name) == value, name, why, expected=text, hint=f"set {name}={text}, or {otherwise}")

    def exclude(self, cause: str, *rows: tuple[str, Any, str]) -> None:
        """Record a mistake for each setting that does not work together with the setting `cause`.

        Args:
            cause: "name=value", or only a name, which stands for any of its values except 0, false and null.
            rows: name of a setting, the only value that works with `cause`, and the reason.
        """
        name, _, text = cause.partition("=")
        with suppress(_Unknown):
            value = self.get(name)
            if render(value) == text if text else value:
                beside = f"with {name}" if value is True else f"with {name} = {value!r}"
                for other, needed, why in rows:
                    self.apply(CheckedConfig.allow, other, needed, f"{beside}: {why}", f"leave out {name}")

    def need(self, ability: str, name: str, value: Any, why: str) -> None:
        """Record a mistake unless the engine has `ability` or the setting `name` has `value`."""
        self.require(
            self.supports(ability) or self.get(name) == value,
            name,
            f"with rollout.engine = {self.get('rollout.engine')!r}, {why}",
            expected=render(value),
            hint=f"leave it out, or set rollout.engine={name_engines(ability)}",
        )
