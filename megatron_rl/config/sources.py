# SPDX-License-Identifier: Apache-2.0
"""Reads a YAML recipe and the command line into one flat list of settings.

Each `Setting` keeps its place (file:line, or the command line) for later errors. Nothing is interpreted here: names
may be unknown and values may have the wrong type.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.checked import Mistakes
from megatron_rl.config.fields import SOURCES, FieldInfo
from megatron_rl.types import UserError

# Layers: a setting of a higher layer replaces one of a lower layer.
ASSUMED, RECIPE, COMMAND_LINE = 0, 1, 2
_MERGE_TAG = "tag:yaml.org,2002:merge"
_DEEPEST = 16
_BOOLEAN_WORDS = ("true", "false", "yes", "no", "on", "off")
_SYNTAX = "section.key=value, --section.key=value, --section.key value, or --leaf value"


@dataclass(frozen=True)
class Setting:
    """One `name = value` as given in a recipe or on the command line."""

    name: str  # full name, native or another project's
    value: Any  # as YAML reads it
    source: str  # file:line, or "command line"
    layer: int  # `RECIPE` or `COMMAND_LINE` (`ASSUMED`: a default of verl that another setting implies)
    text: str | None = None  # the characters as typed on the command line
    weak: bool = False  # yields to another setting of the same name and layer


def read_recipe(path: Path, mistakes: Mistakes) -> list[Setting]:
    """Read a recipe: nested mappings become dotted names; a repeated key is a mistake.

    Raises:
        UserError: no such file, or malformed YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the recipe: {error}",
            source=str(path),
            expected="a YAML file (UTF-8)",
            hint="check the path; relative paths start at the working directory",
        ) from error
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        settings = [] if root is None else _Walker(path, loader, mistakes).walk(root, "", 0)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise UserError(
            f"malformed YAML: {getattr(error, 'problem', None) or error}",
            source=f"{path}:{mark.line + 1}" if mark else str(path),
            expected="one YAML document with nested mappings, e.g. 'model:' and below it '  path: DIR'",
            hint="check indentation, colons and quotes around this line",
        ) from error
    finally:
        loader.dispose()
    _refuse_repeated(settings, mistakes)
    return settings


def read_mapping(sections: Mapping[str, Any], mistakes: Mistakes, prefix: str = "") -> list[Setting]:
    """Read settings that a program passes: nested mappings and dotted names alike."""
    settings = []
    for key, value in sections.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            settings += read_mapping(value, mistakes, f"{name}.")
        else:
            plain = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            settings.append(Setting(name, plain, "the config that was passed", RECIPE))
    if not prefix:
        _refuse_repeated(settings, mistakes)
    return settings


class _Walker:
    """Flattens the node tree of one recipe."""

    def __init__(self, path: Path, loader: yaml.SafeLoader, mistakes: Mistakes) -> None:
        self.path, self.loader, self.mistakes = path, loader, mistakes

    def walk(self, node: yaml.Node, prefix: str, depth: int) -> list[Setting]:
        source = f"{self.path}:{node.start_mark.line + 1}"
        if isinstance(node, yaml.MappingNode) and depth <= _DEEPEST:
            self._refuse_duplicates(node, prefix)
            self.loader.flatten_mapping(node)  # resolves '<<: *anchor'; merged keys come first, own keys win
            children = {str(key.value): child for key, child in node.value}
            start = f"{prefix}." if prefix else ""
            return [item for key, child in children.items() for item in self.walk(child, f"{start}{key}", depth + 1)]
        if prefix == SOURCES and isinstance(node, yaml.SequenceNode):  # each entry has settings with lines of their own
            entries = [self.walk(entry, f"{SOURCES}[{number}]", depth) for number, entry in enumerate(node.value)]
            return [item for entry in entries for item in entry]
        if not prefix or isinstance(node, yaml.MappingNode):
            raise UserError(
                "the recipe is not a mapping of sections" if not prefix else f"{prefix} is nested too deeply",
                source=source,
                expected="sections with settings below them",
                hint="see launch/recipes for examples",
            )
        try:
            value = self.loader.construct_object(node, deep=True)
        except ValueError as error:  # e.g. a date that does not exist
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error
        return [Setting(prefix, value, source, RECIPE)]

    def _refuse_duplicates(self, node: yaml.MappingNode, prefix: str) -> None:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key.start_mark)
            line = key.start_mark.line + 1
            if key.value in lines and key.tag != _MERGE_TAG:
                name = f"{prefix}.{key.value}" if prefix else key.value
                first = f"{self.path}:{lines[key.value]}"
                self.mistakes.errors.append(_repeated_error(name, first, f"{self.path}:{line}"))
            lines[key.value] = line


def _refuse_repeated(settings: list[Setting], mistakes: Mistakes) -> None:
    """Record a mistake for each setting given as two different YAML keys, `actor: {lr: 1}` and `actor.lr: 2`."""
    seen: dict[str, Setting] = {}
    for setting in settings:
        if setting.name in seen:
            mistakes.errors.append(_repeated_error(setting.name, seen[setting.name].source, setting.source))
        seen[setting.name] = setting


def _repeated_error(name: str, first: str, second: str) -> UserError:
    return UserError(
        f"{name!r} stands twice in the recipe",
        source=f"{first} and {second}",
        expected="each key once",
        hint="remove one of the two",
    )


def read_overrides(
    arguments: Sequence[str], fields: Mapping[str, FieldInfo], aliases: Callable[[], Any], mistakes: Mistakes
) -> list[Setting]:
    """Read overrides from the command line after the recipe, in their order.

    Args:
        fields: the settings, for the Megatron spelling `--leaf value`.
        aliases: returns `compat.aliases`; flags without a setting of that name may use its names.
    """
    settings = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        name, separator, text = argument.partition("=")
        is_flag, number = name.startswith("--") and len(name) > 2, len(mistakes.errors)
        is_cut = separator and not text and _is_bare(rest)  # 'actor.lr= 1e-6'
        with mistakes.collect():
            if not (separator or is_flag) or (name.startswith("-") and not is_flag) or is_cut:
                raise UserError(
                    f"{argument!r} is not an override",
                    source="command line",
                    expected=_SYNTAX,
                    hint="write = without spaces beside it, and quotes around values that contain spaces",
                )
            # '+key=value' as in Hydra
            name = _flag_name(name, fields, aliases) if is_flag else name.lstrip("+")
            with mistakes.collect(name):
                if not separator:
                    text = _take_value(name, rest, fields, aliases)
                settings.append(Setting(name, _parse_value(name, text), "command line", COMMAND_LINE, text))
        while len(mistakes.errors) > number and _is_bare(rest):
            rest.popleft()  # the value of a flag that there is not, or the rest of a text with spaces
    return settings


def _is_bare(rest: deque[str]) -> bool:
    return bool(rest) and "=" not in rest[0].strip("=") and not rest[0].startswith("--")


_ROLES_LIKE_THE_ACTOR = ("critic", "reward_model", "teachers")


def _flag_name(flag: str, fields: Mapping[str, FieldInfo], aliases: Callable[[], Any]) -> str:
    name = flag[2:].replace("-", "_")
    if "." in name:
        return name
    candidates = [full for full in fields if full.endswith(f".{name}") and not full.startswith(SOURCES)]
    candidates = candidates or ([name] if name in aliases().alias_targets() else [])
    if not candidates:
        from megatron_rl.config.suggestions import unknown_key_error

        raise unknown_key_error(name, "command line", fields, aliases().alias_targets())
    if f"actor.{name}" in candidates:  # Megatron's flags describe the model that is trained
        candidates = [full for full in candidates if full.partition(".")[0] not in _ROLES_LIKE_THE_ACTOR]
    if len(candidates) > 1:
        raise UserError(
            f"{flag} is ambiguous: {' and '.join(candidates)} end in it",
            source="command line",
            expected="the full name",
            hint=" or ".join(f"{candidate}=VALUE" for candidate in candidates),
        )
    return candidates[0]


def _take_value(name: str, rest: deque[str], fields: Mapping[str, FieldInfo], aliases: Callable[[], Any]) -> str:
    following = rest[0] if rest else "--"
    ours = name if name in fields else aliases().alias_targets().get(name)
    if ours in fields and fields[ours].kind is bool:
        return rest.popleft() if following.lower() in _BOOLEAN_WORDS else "true"
    if ours in fields and fields[ours].kind == bool | str and following.startswith("--"):
        return "true"
    if following.startswith("--"):
        raise UserError(f"--{name} has no value", source="command line", expected=_SYNTAX, hint=f"write {name}=VALUE")
    return rest.popleft()


def _parse_value(name: str, text: str) -> Any:
    if text.startswith("${"):
        return text  # YAML would read a mapping
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        if not text.startswith(("[", "{")):
            return text  # text such as '@run' or '2024-13-45' is valid for a text setting
        raise UserError(
            f"the value of {name} cannot be read: {text!r}",
            source="command line",
            expected="a YAML scalar or list, e.g. 8, 1e-6, true, text, [a, b]",
            hint="quote spaces and special characters",
        ) from error


def describe(setting: Setting) -> str:
    """Format a setting as `name=value (place)`."""
    text = repr(setting.value)
    return f"{setting.name}={text if len(text) <= 60 else text[:57] + '...'} ({setting.source})"
