# SPDX-License-Identifier: Apache-2.0
"""A config under examination: values by full name, and errors that say where a value comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from megatron_rl.config.schema import RunConfig
from megatron_rl.types import UserError


@dataclass(frozen=True)
class CheckedConfig:
    """A config whose values are read by full name, with the place each value comes from."""

    config: RunConfig
    sources: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """The value of "section.name"."""
        section, _, leaf = name.partition(".")
        if section == "teachers":
            teacher, _, leaf = leaf.partition(".")
            return attrgetter(leaf)(self.config.teachers[teacher])
        return attrgetter(name)(self.config)

    def require(self, holds: bool, name: str, why: str, *, expected: str, hint: str) -> None:
        """Raise for `name` unless `holds`; `why` continues the sentence "name = value"."""
        if holds:
            return
        place = self.sources.get(name)
        raise UserError(
            f"{name} = {self.get(name)!r} {why}",
            source=f"{name} ({place})" if place else name,
            expected=expected,
            hint=hint,
        )
