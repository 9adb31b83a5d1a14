# SPDX-License-Identifier: Apache-2.0
"""Names and types of all settings, read from the dataclasses of `schema.py` and of plugins; a config as dict and YAML.

The dataclasses are the only declarations; this module makes one flat table `section.leaf -> FieldInfo` and checks
values against annotations.

Plugins declare `algorithm.options.<name>.<key>`: an estimator, loss or aggregation that is registered with `options=` a
frozen dataclass receives an instance of it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import operator
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from megatron_rl.config.algorithm import OPTIONS
from megatron_rl.config.schema import MISSING, NOT_OWN, LayoutConfig, RunConfig
from megatron_rl.types import UserError

_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
_REFUSED = object()
_LARGEST, _SMALLEST = 3e38, 1e-37  # of float32, in which numbers are used; outside of it they would be infinite or 0
# Types beside Literal that a setting may have, each also with `| None`, and their names.
SIMPLE_TYPES: dict[Any, str] = {
    int: "integer",
    float: "number",
    bool: "true or false",
    bool | str: "true, false or text",
    int | str: "integer or text",
    str: "text",
    list[str]: "list of texts",
    list[int]: "list of integers",
    list[int | str]: "list of integers and texts",
    list[float]: "list of numbers",
}
_TEXTS = (str, bool | str, int | str)
# Comparison of a value with a bound, its sign, and in words how to keep it.
_COMPARISONS: dict[str, tuple[Any, str, str]] = {
    "ge": (operator.ge, ">=", "{} or more"),
    "gt": (operator.gt, ">", "> {}"),
    "le": (operator.le, "<=", "{} or less"),
    "lt": (operator.lt, "<", "< {}"),
}
_WRONG = {("ge", 0): "is negative", ("gt", 0): "is not positive"}
_read_hints = functools.cache(typing.get_type_hints)
TEACHERS, SOURCES = "teachers", "data.sources"  # their keys are names


@dataclass(frozen=True)
class FieldInfo:
    """One setting, as `option` declares it; the default is `MISSING` if the user must give a value."""

    name: str  # section.leaf
    annotation: Any
    default: Any
    doc: str
    unit: str
    bounds: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def section(self) -> str:
        """Name of the section."""
        return self.name.partition(".")[0]

    @property
    def leaf(self) -> str:
        """Name inside the section."""
        return self.name.partition(".")[2]

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is MISSING

    @property
    def kind(self) -> Any:
        """The annotation without `| None`."""
        if not self.accepts_none:
            return self.annotation
        return functools.reduce(
            operator.or_, (arg for arg in typing.get_args(self.annotation) if arg is not type(None))
        )

    @property
    def accepts_none(self) -> bool:
        """True for `X | None`."""
        return type(None) in typing.get_args(self.annotation)

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a mapping, with free keys or with a dataclass's keys."""
        return self.kind == dict[str, Any] or dataclasses.is_dataclass(self.kind)

    @property
    def choices(self) -> tuple[str, ...]:
        """Accepted values of a `Literal`, or of a list's items, as YAML writes them, else ()."""
        literal = typing.get_args(self.kind)[0] if typing.get_origin(self.kind) is list else self.kind
        words = typing.get_args(literal) if typing.get_origin(literal) is Literal else ()
        return tuple(word if isinstance(word, str) else str(word).lower() for word in words)

    def describe_type(self) -> str:
        """Return the accepted values in words: "integer or null", "float32 | bfloat16"."""
        words = " | ".join(self.choices) if self.choices else "mapping" if self.is_mapping else SIMPLE_TYPES[self.kind]
        words = f"list of {words}" if self.choices and typing.get_origin(self.kind) is list else words
        return f"{words} or null" if self.accepts_none else words

    def find_violation(self, value: Any) -> dict[str, str] | None:
        """Return `why`, `expected` and `hint` of an error if the value is out of bounds, else None."""
        bounds = {key: self.bounds[key] for key in _COMPARISONS if key in self.bounds and value is not None}
        for key, bound in bounds.items():
            holds, _, words = _COMPARISONS[key]
            if not holds(value, bound):
                usual = _WRONG.get((key, bound), "is too small" if key[0] == "g" else "is too large")
                return {
                    "why": self.bounds.get("wrong", usual),
                    "expected": ", ".join(f"{_COMPARISONS[one][1]} {limit}" for one, limit in bounds.items()),
                    "hint": self.bounds.get("hint", f"set {self.name} to {words.format(bound)}"),
                }
        return None


def list_fields(teachers: Iterable[str] = ("NAME",), sources: Iterable[str] | None = None) -> dict[str, FieldInfo]:
    """Return every setting of every section by full name, in order.

    Args:
        teachers: names of teachers; by default NAME stands for them.
        sources: names of sources of prompts, whose settings include the run's that they may have for themselves; by
            default NAME stands for them, with the settings that no other section has.
    """
    table: dict[str, FieldInfo] = {}
    for section, section_class in section_classes().items():
        for prefix in [f"{TEACHERS}.{name}" for name in teachers] if section == TEACHERS else [section]:
            found = read_fields(section_class, prefix)
            if issubclass(section_class, LayoutConfig) and section != "actor":
                found = {name: info for name, info in found.items() if name.rpartition(".")[2] not in NOT_OWN}
            if section == "data":
                del found[SOURCES]
                for name in ("NAME",) if sources is None else sources:
                    from megatron_rl.config.source_settings import SourceConfig

                    found |= read_fields(SourceConfig, f"{SOURCES}.{name}")
                    del found[f"{SOURCES}.{name}.own"]
            table |= found
    for name in sources or ():
        from megatron_rl.config.source_settings import read_own_fields

        table |= read_own_fields(name, table)
    table.pop("algorithm.options")
    return table


def read_fields(declaration: Any, prefix: str) -> dict[str, FieldInfo]:
    """Return the settings of a dataclass by full name, in order, nested ones included."""
    hints, found = _read_hints(declaration), {}
    for item in dataclasses.fields(declaration):
        name, annotation = f"{prefix}.{item.name}", hints[item.name]
        if dataclasses.is_dataclass(annotation) and "doc" not in item.metadata:
            found |= read_fields(annotation, name)
            continue
        default = item.default if item.default_factory is MISSING else item.default_factory()
        said = {"doc": "", "unit": "", "bounds": {}} | dict(item.metadata)
        found[name] = FieldInfo(name, annotation, default, said["doc"], said["unit"], said["bounds"])
    return found


def build_section(declaration: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    """Build a dataclass of settings, nested ones included, from values by full name, with defaults for missing ones."""
    hints, given = _read_hints(declaration), {}
    for item in dataclasses.fields(declaration):
        name, annotation = f"{prefix}.{item.name}", hints[item.name]
        if name in values:
            given[item.name] = values[name]
        elif dataclasses.is_dataclass(annotation) and "doc" not in item.metadata:
            given[item.name] = build_section(annotation, name, values)
    return declaration(**given)


def section_classes() -> dict[str, type]:
    """Return section name -> dataclass, in order of declaration; for `teachers`, the dataclass of one teacher."""
    hints = _read_hints(RunConfig)
    classes = {item.name: hints[item.name] for item in dataclasses.fields(RunConfig) if item.name != "flags"}
    return classes | {TEACHERS: typing.get_args(classes[TEACHERS])[1]}


def coerce(info: FieldInfo, value: Any, source: str, text: str | None = None) -> Any:
    """Convert a YAML value to the type of a setting: 1 to 1.0, an item to a list of one, a mapping to a dataclass.

    Args:
        source: place of the value, for the error.
        text: the characters as typed on the command line, if any; a setting that takes text gets them unchanged
            (`trainer.run_dir=2024`).

    Raises:
        UserError: the value has another type or is not among the choices.
    """
    if value is None and info.accepts_none:
        return None
    if dataclasses.is_dataclass(info.kind) and isinstance(value, dict):
        return _convert_entries(info, value, source)
    result = _convert(info, value, text)
    if result is not _REFUSED:
        return result
    raise UserError(
        f"{info.name} = {value!r} ({type(value).__name__}) is not accepted",
        source=source,
        expected=info.describe_type() + (f" [{info.unit}]" if info.unit else ""),
        hint=_type_hint(info, value),
    )


def _convert_entries(info: FieldInfo, value: Mapping[Any, Any], source: str) -> Any:
    declared, entries = read_fields(info.kind, info.name), {}
    for key, entry in value.items():
        name = f"{info.name}.{key}"
        if name not in declared:
            from megatron_rl.config.suggestions import unknown_key_error

            raise unknown_key_error(name, source, declared, {})
        entries[key] = coerce(declared[name], entry, source)
        if violation := declared[name].find_violation(entries[key]):
            why = violation.pop("why")
            raise UserError(f"{name} = {entries[key]!r} {why}", source=source, **violation)
    return info.kind(**entries)


def _convert(info: FieldInfo, value: Any, text: str | None) -> Any:
    if info.choices:
        if value is False and "off" in info.choices:
            return "off"  # YAML 1.1 reads the word as a boolean
        if typing.get_origin(info.kind) is list:
            items = value if isinstance(value, list) else [value]
            return list(items) if all(item in info.choices for item in items) else _REFUSED
        is_one = any(type(value) is type(choice) and value == choice for choice in typing.get_args(info.kind))
        return value if is_one else _REFUSED
    kind = info.kind
    if dataclasses.is_dataclass(kind):
        return _REFUSED
    if kind is bool or (kind == bool | str and isinstance(value, bool)):
        return value if isinstance(value, bool) else _REFUSED
    if kind is int or (kind == int | str and _is_integer(value)):
        return value if _is_integer(value) else _REFUSED
    if kind is float:
        return _convert_number(value)
    if kind in _TEXTS and not isinstance(value, str):
        return text if text and value is not None else _REFUSED
    if kind in _TEXTS:
        return _REFUSED if "\0" in value else value
    if kind == dict[str, Any]:
        return dict(value) if isinstance(value, dict) and all(isinstance(key, str) for key in value) else _REFUSED
    items, (item_kind,) = value if isinstance(value, list) else [value], typing.get_args(kind)
    if item_kind is float:
        items = [_convert_number(item) for item in items]
    kinds = typing.get_args(item_kind) or (item_kind,)
    return list(items) if all(type(i) in kinds and (type(i) is not int or _is_integer(i)) for i in items) else _REFUSED


def read_number(value: Any) -> Any:
    """Return the number that YAML 1.1 reads as text, such as 1e-6 (no dot), and other values as they are."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _convert_number(value: Any) -> Any:
    value = read_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _REFUSED
    return float(value) if value == 0 or _SMALLEST <= abs(value) <= _LARGEST else _REFUSED


def _is_integer(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _type_hint(info: FieldInfo, value: Any) -> str:
    if value is None:
        return f"give {info.name} a value" + ("" if info.required else f", or remove it (default: {info.default!r})")
    if info.choices:
        close = difflib.get_close_matches(str(value), info.choices, n=1)
        return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(info.choices)}"
    if isinstance(value, str) and info.kind in (int, bool):
        return f"for example {info.name}={'8' if info.kind is int else 'true'}, without quotes"
    if info.kind is str and isinstance(value, str):
        return "no file and no address has the character NUL in its name"
    if info.kind is str:
        return "put the value in quotes"
    if info.kind is float:
        return f"write {info.name} as a number: 0, or from {_SMALLEST} to {_LARGEST} in size"
    if info.kind is int and type(value) is int:
        return "integers have 64 bits"
    return f"write {info.name} as {info.describe_type()}"


PREFIX = "algorithm.options"


def list_options() -> dict[str, FieldInfo]:
    """Return the settings declared by the plugins of this process, by full name."""
    return {
        key: info for name, options in OPTIONS.items() for key, info in read_fields(options, f"{PREFIX}.{name}").items()
    }


WIDTH = 100  # of texts in columns


def config_to_dict(cfg: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the resolved config as section -> key -> value, with JSON and YAML types.

    Credentials in URLs are removed, since the result is written to files, checkpoints and W&B.
    """
    sections = dataclasses.asdict(cfg)
    del sections["flags"]
    for role in (sections["critic"], sections["reward_model"], *sections["teachers"].values()):
        for leaf in NOT_OWN:
            role.pop(leaf, None)
    for source in sections["data"]["sources"].values():
        for name, value in source.pop("own").items():
            section, _, leaf = name.rpartition(".")
            (source.setdefault(section, {}) if section else source)[leaf] = value
    return _redact_all(sections)


def redact(text: str) -> str:
    """Replace the credentials of each URL in a text, `http://user:token@host`, by ***."""
    return re.sub(r"(https?://)[^/?#\s]+@", r"\1***@", text)


def _redact_all(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redact_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_redact_all(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def dump_yaml(cfg: RunConfig) -> str:
    """Return the resolved config as YAML; `load_config` reads an equal config back, except for credentials in URLs."""
    return format_yaml(config_to_dict(cfg))


def format_yaml(sections: dict[str, Any]) -> str:
    """Return nested settings as YAML."""
    return yaml.dump(sections, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=WIDTH)


class _Dumper(yaml.SafeDumper):
    """YAML writer that indents lists inside mappings."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def render(value: Any) -> str:
    """Format a setting's value as a recipe spells it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if dataclasses.is_dataclass(value):
        items = (f"{item.name}: {render(getattr(value, item.name))}" for item in dataclasses.fields(value))
        return f"{{{', '.join(items)}}}"
    return json.dumps(value) if isinstance(value, str) and "\n" in value else str(value)
