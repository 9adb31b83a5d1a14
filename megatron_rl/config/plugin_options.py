# SPDX-License-Identifier: Apache-2.0
"""Options of one algorithm, the settings `algorithm.options.<name>.<key>`: their declarations and values in a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from megatron_rl.config.algorithm import OPTIONS
from megatron_rl.config.fields import PREFIX, SIMPLE_TYPES, coerce, read_fields
from megatron_rl.types import UserError


def check_options(name: str, options: type, place: str) -> None:
    """Refuse an invalid dataclass of a plugin's options, registered at `place` (file:line).

    Raises:
        UserError: no frozen dataclass, a field without a default or of an unsupported type, a default of another type,
            or a name that has other options already.
    """
    declared: Any = options if isinstance(options, type) and dataclasses.is_dataclass(options) else None
    if declared is None or not declared.__dataclass_params__.frozen:
        raise UserError(
            f"the options of {name!r} are {getattr(options, '__name__', options)}",
            source=place,
            expected="a frozen dataclass",
            hint="write @dataclass(frozen=True) above the class, and give options= the class itself",
        )
    if OPTIONS.get(name, options) is not options:
        raise UserError(
            f"algorithm.options.{name} is declared already",
            source=place,
            expected="one set of options for a name",
            hint="choose another name, or give both the same class",
        )
    for info in read_fields(options, f"{PREFIX}.{name}").values():
        if info.required:
            raise UserError(
                f"{info.name} has no default",
                source=place,
                expected="a default for every option",
                hint=f"write {info.leaf.rpartition('.')[2]}: TYPE = DEFAULT",
            )
        if not (info.choices or info.kind in SIMPLE_TYPES):
            raise UserError(
                f"{info.name} has the type {getattr(info.annotation, '__name__', info.annotation)}",
                source=place,
                expected="int, float, bool, str, list of str, int or float, or Literal, each alone or with | None",
                hint="declare it with one of these types",
            )
        coerce(info, info.default, place)
    options()  # an exception of its own checks on the defaults is the error of the import


def build_options(used: Collection[str], values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Build the options that are used or not the defaults, name -> instance of its options dataclass.

    Args:
        used: names of the configured estimator, loss and aggregation.
        values: checked values by full name; missing ones get their defaults.
        sources: full name -> place of each value, for errors.

    Raises:
        UserError: the dataclass itself refuses the values, in its `__post_init__`.
    """
    built = {}
    for name, options in OPTIONS.items():
        given = {key: values[key] for key in read_fields(options, f"{PREFIX}.{name}") if key in values}
        try:
            if given or name in used:
                made = options(**{key.rpartition(".")[2]: value for key, value in given.items()})
                built |= {name: made} if name in used or made != options() else {}
        except UserError:
            raise
        except Exception as error:
            places = ", ".join(f"{key} ({sources[key]})" for key in given)
            raise UserError(
                f"{', '.join(f'{key} = {value!r}' for key, value in given.items())}: {error}",
                source=places,
                expected=f"what {options.__name__} accepts",
                hint="see --help for the plugin's options",
            ) from error
    return built
