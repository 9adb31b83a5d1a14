# SPDX-License-Identifier: Apache-2.0
"""`${...}` in values: references to other settings, as verl's recipes have them.

Understood are `${section.key}`, `${.key}` (a neighbor; one more dot per level upwards) and
`${oc.select:section.key,default}`. A reference sees the value that is valid in the end, the command line included.
Everything else that Hydra resolves (environment variables, arithmetic) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from megatron_rl.config.sources import Setting
from megatron_rl.types import UserError

_REFERENCE = re.compile(r"\$\{((?:[^${}]|\{\})*)\}")
_SELECT = "oc.select:"


def resolve_references(settings: Sequence[Setting]) -> list[Setting]:
    """Put values in the place of references.

    Args:
        settings: in order; of two with the same name the later one is referred to.

    Raises:
        UserError: a reference to itself, to a setting that is not given, or of another kind.
    """
    latest = {setting.name: setting for setting in settings}
    return [
        replace(setting, value=_resolve(setting.value, setting, latest, (setting.name,)), text=None)
        if _has_reference(setting.value)
        else setting
        for setting in settings
    ]


def _has_reference(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _resolve(value: Any, setting: Setting, latest: Mapping[str, Setting], path: tuple[str, ...]) -> Any:
    if not _has_reference(value):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole:
        return _look_up(whole[1], setting, latest, path)
    text = _REFERENCE.sub(lambda match: str(_look_up(match[1], setting, latest, path)), value)
    if "${" in text:
        raise _error(setting, f"{setting.name} = {value!r} contains an interpolation")
    return text


def _look_up(body: str, setting: Setting, latest: Mapping[str, Setting], path: tuple[str, ...]) -> Any:
    is_select = body.startswith(_SELECT)
    name, _, default = body.removeprefix(_SELECT).partition(",") if is_select else (body, "", "")
    name = _absolute(name.strip(), path[-1])
    if name in path:
        raise _error(setting, f"{setting.name} refers to itself: {' -> '.join((*path, name))}")
    if name in latest:
        return _resolve(latest[name].value, setting, latest, (*path, name))
    if is_select:
        return yaml.safe_load(default) if default.strip() else None
    raise _error(setting, f"{setting.name} = '${{{body}}}' contains an interpolation of a name that is not given")


def _absolute(name: str, place: str) -> str:
    levels = len(name) - len(name.lstrip("."))
    return ".".join([*place.split(".")[:-levels], name[levels:]]) if levels else name


def _error(setting: Setting, found: str) -> UserError:
    return UserError(
        found,
        source=setting.source,
        expected="a plain value, ${section.key}, ${.key} or ${oc.select:section.key,default}",
        hint="write the value itself",
    )
