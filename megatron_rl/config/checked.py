# SPDX-License-Identifier: Apache-2.0
"""A config under examination: values by full name, and all of its mistakes, each with the place of the value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from operator import attrgetter
from types import FunctionType
from typing import Any

from megatron_rl.config.options import PREFIX, find_options
from megatron_rl.config.schema import RunConfig
from megatron_rl.extension.engines import find_engine
from megatron_rl.types import UserError, UserErrors


@dataclass(frozen=True)
class Mistakes:
    """The errors found so far, and the settings whose values are no values: what depends on them is not judged."""

    errors: list[UserError] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    @contextmanager
    def collect(self, *names: str) -> Iterator[None]:
        """Note an error of the block, which ends there, and that the settings `names` have no value."""
        try:
            yield
        except UserError as error:
            self.errors.append(error)
            self.refused.update(names)

    def raise_all(self) -> None:
        """Raise what was found, if anything, as one error.

        Raises:
            UserError: see above.
        """
        errors = list({str(error): error for error in self.errors}.values())
        if errors:
            raise errors[0] if len(errors) == 1 else UserErrors(errors)


class _Unknown(Exception):
    """A rule reads a setting that was refused."""


@dataclass(frozen=True)
class CheckedConfig:
    """A config whose values are read by full name, with the place each value comes from."""

    config: RunConfig
    sources: Mapping[str, str] = field(default_factory=dict)
    mistakes: Mistakes = field(default_factory=Mistakes)

    def apply(self, rule: Callable[..., None], *args: Any) -> None:
        """Call a rule with this config; it ends where it reads a setting that was refused."""
        with suppress(_Unknown):
            rule(self, *args)

    def get(self, name: str) -> Any:
        """The value of "section.name"; of what a section derives from its settings, too."""
        section, _, leaf = name.partition(".")
        if section == "teachers":
            teacher, _, leaf = leaf.partition(".")
            section = f"teachers.{teacher}"
        owner, refused = self.config.section(section), self.mistakes.refused
        if name.startswith(f"{PREFIX}."):
            plugin, _, leaf = leaf.partition(".")[2].partition(".")
            owner = find_options(owner, plugin)
        read = [name]
        if isinstance(getattr(type(owner), leaf, None), property | FunctionType):
            declaring = next(one for one in type(owner).__mro__ if leaf in vars(one))
            read += [f"{section}.{item.name}" for item in fields(declaring)]
        if refused.intersection(read):
            raise _Unknown
        return attrgetter(leaf)(owner)

    def supports(self, ability: str) -> bool:
        """Whether the engine has one of `extension.engines.ABILITIES`."""
        return find_engine(self.get("rollout.engine")).has(ability)

    def require(self, holds: bool, name: str, why: str, *, expected: str, hint: str) -> bool:
        """Note a mistake in `name` unless `holds`, which is returned; `why` continues the sentence "name = value"."""
        if not holds:
            place = self.sources.get(name)
            source = f"{name} ({place})" if place else name
            found = f"{name} = {self.get(name)!r} {why}"
            self.mistakes.errors.append(UserError(found, source=source, expected=expected, hint=hint))
        return holds
