# SPDX-License-Identifier: Apache-2.0
"""Load a recipe and a command line into a checked `RunConfig`.

The path of a setting: read with its place (`sources.py`), references `${section.key}` resolved, plugins imported (they
declare settings, `fields.py`), verl names translated (`compat/aliases.py`), the recipe overridden by the command
line, types checked (`fields.py`), settings without effect set aside and combinations checked (`checks.py`).
torch is not imported, so that a dry run starts at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.algorithm import OPTIONS
from megatron_rl.config.checked import Mistakes
from megatron_rl.config.checks import check_config, put_aside
from megatron_rl.config.fields import (
    PREFIX,
    SOURCES,
    TEACHERS,
    FieldInfo,
    build_section,
    coerce,
    list_fields,
    list_options,
    section_classes,
)
from megatron_rl.config.schema import Flags, RunConfig
from megatron_rl.config.sections import MISSING
from megatron_rl.config.sources import ASSUMED, RECIPE, Setting, describe, read_mapping, read_overrides, read_recipe
from megatron_rl.extension.registry import ENGINES
from megatron_rl.types import UserError

_REFERENCE = re.compile(r"\$\{((?:[^${}]|\{\})*)\}")
_SELECT = "oc.select:"


def _resolve_references(settings: Sequence[Setting], mistakes: Mistakes) -> list[Setting]:
    """Replace references `${section.key}` by values; of two settings with the same name, the later one is used."""
    latest = {setting.name: setting for setting in settings}
    resolved = []
    for setting in settings:
        with mistakes.collect(setting.name):
            value = _resolve(setting.value, setting, latest, (setting.name,))
            resolved.append(setting if value is setting.value else replace(setting, value=value, text=None))
    return resolved


def _resolve(value: Any, setting: Setting, latest: Mapping[str, Setting], path: tuple[str, ...]) -> Any:
    text = value
    while isinstance(text, str) and "${" in text:
        whole = _REFERENCE.fullmatch(text)
        if whole:
            return _look_up(whole[1], setting, latest, path)
        text, found = _REFERENCE.subn(lambda match: _as_text(_look_up(match[1], setting, latest, path)), text)
        if not found:
            raise _error(setting, f"{setting.name} = {value!r} contains an interpolation")
    return text


def _as_text(value: Any) -> str:
    return "null" if value is None else str(value)


def _look_up(body: str, setting: Setting, latest: Mapping[str, Setting], path: tuple[str, ...]) -> Any:
    is_select = body.startswith(_SELECT)
    name, _, default = body.removeprefix(_SELECT).partition(",") if is_select else (body, "", "")
    name = name.strip()
    if levels := len(name) - len(name.lstrip(".")):  # relative to the section of the setting that refers
        name = ".".join([*path[-1].split(".")[:-levels], name[levels:]])
    if name in path:
        raise _error(setting, f"{setting.name} refers to itself: {' -> '.join((*path, name))}")
    if name in latest:
        return _resolve(latest[name].value, setting, latest, (*path, name))
    if is_select:
        return yaml.safe_load(default) if default.strip() else None
    raise _error(setting, f"{setting.name} = '${{{body}}}' contains an interpolation of a name that is not given")


def _error(setting: Setting, found: str) -> UserError:
    return UserError(
        found,
        source=setting.source,
        expected="a plain value, ${section.key}, ${.key} or ${oc.select:section.key,default}",
        hint="write the value itself",
    )


_PLUGINS = "algorithm.plugins"
_ENGINE = "rollout.engine"


@dataclass(frozen=True)
class LoadedConfig:
    """A config with its origin."""

    config: RunConfig  # resolved, without the settings that have no effect
    notes: list[str]  # one line for each setting without effect
    sources: dict[str, str]  # full name -> file:line or "command line", for the given settings
    num_ranks: int | None = None  # ranks requested by a verl recipe (nodes times GPUs per node); torchrun decides


def load_config(recipe: Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a recipe, override it by the command line, and check the result.

    Args:
        recipe: YAML file or mapping, with nested sections; `None` if the command line contains everything.
        overrides: `section.key=value`, `--section.key value`, `--leaf value`, verl names alike; and `Flags`.

    Raises:
        UserError: every setting that is unreadable, unknown, of the wrong type, missing, or refused by `check_config`;
            a file that is not YAML, alone.
    """
    mistakes = Mistakes()
    flags = Flags()
    if any(word.startswith(("--explain", "--debug-rank")) for word in overrides):
        from megatron_rl.config.flags import take_flags

        flags, overrides = take_flags(overrides)
    given = read_settings(recipe, overrides, mistakes)
    parts = [setting.name.split(".") for setting in given]
    teachers = list(dict.fromkeys(part[1] for part in parts if part[0] == TEACHERS and len(part) > 1))
    mixed = list(dict.fromkeys(one[2] for one in parts if one[:2] == ["data", "sources"] and len(one) > 2))
    fields = list_fields(teachers, mixed) | list_options()
    settings = _gather_mappings(given, fields)
    notes, num_ranks = list[str](), None
    if not all(_is_ours(setting, fields) for setting in settings):
        num_ranks = _aliases().find_ranks(settings)
        settings, notes = _aliases().translate(settings, fields, mistakes)
    notes = _find_contradictions(settings) + notes
    chosen = _choose(settings, fields, mistakes)
    _require_all(chosen, fields, recipe, mistakes, {"data.train_files"} if mixed else set())
    sources = {name: choice.source for name, choice in chosen.items()}
    values = dict.fromkeys((name for name, info in fields.items() if info.required), MISSING)
    values |= {name: choice.value for name, choice in chosen.items()}
    if _PLUGINS in mistakes.refused:  # a plugin may register the engine
        mistakes.refused.add(_ENGINE)
    else:
        with mistakes.collect(_ENGINE):
            if _ENGINE in chosen:
                ENGINES.check(chosen[_ENGINE].value, sources[_ENGINE])
    if _ENGINE in mistakes.refused:
        values.pop(_ENGINE, None)
    if mixed:
        from megatron_rl.config.mixture import add_sources

        notes += add_sources(values, mixed, sources)
    classes = section_classes()
    make_teacher = classes.pop(TEACHERS)
    sections = {name: build_section(declaration, name, values) for name, declaration in classes.items()}
    sections[TEACHERS] = {name: build_section(make_teacher, f"{TEACHERS}.{name}", values) for name in teachers}
    algorithm = sections["algorithm"]
    used = {algorithm.adv_estimator, algorithm.policy_loss, algorithm.loss_agg_mode} & OPTIONS.keys()
    if used or any(name.startswith(f"{PREFIX}.") for name in values):
        from megatron_rl.config.plugin_options import build_options

        with mistakes.collect():
            sections["algorithm"] = replace(algorithm, options=build_options(used, values, sources))
    config, idle = put_aside(RunConfig(**sections, flags=flags), sources)
    config, more = put_aside(config.share_settings(), sources)
    check_config(config, sources, mistakes)
    return LoadedConfig(config, [*notes, *dict.fromkeys([*idle, *more])], sources, num_ranks)


def read_settings(
    recipe: Path | Mapping[str, Any] | None, overrides: Sequence[str], mistakes: Mistakes
) -> list[Setting]:
    """Read a recipe and the command line, and import their plugins, which declare further settings.

    Args:
        mistakes: collects unreadable settings, and plugins that cannot be imported.

    Raises:
        UserError: the recipe is not YAML.
    """
    fields = list_fields(sources=())
    if not recipe or isinstance(recipe, Mapping):
        settings = read_mapping(recipe or {}, mistakes)
    else:
        settings = read_recipe(Path(recipe), mistakes)
        if any(one.name == "defaults" for one in settings):
            settings = _verl_defaults().compose(Path(recipe), settings, mistakes)
    if any(argument.startswith(("--config-", "-c")) for argument in overrides):  # Hydra's flags
        flags, overrides = _verl_defaults().take_flags(overrides)
        settings += _verl_defaults().read_named(flags, mistakes) if flags else []
    settings += read_overrides(overrides, fields, _aliases, mistakes)
    settings = [  # `layout: auto` is the mode of the section
        replace(one, name="layout.mode") if one.name == "layout" and isinstance(one.value, str) else one
        for one in settings
    ]
    if any(one.name.startswith(SOURCES) for one in settings):
        from megatron_rl.config.mixture import name_sources

        settings = name_sources(settings, mistakes)
    settings = _without_empty_sections(settings, mistakes)
    settings = _resolve_references(settings, mistakes)
    plugins = _choose([setting for setting in settings if setting.name == _PLUGINS], fields, mistakes)
    with mistakes.collect(_PLUGINS):
        if _PLUGINS in plugins:
            from megatron_rl.extension.user_code import load_plugins

            load_plugins(plugins[_PLUGINS].value)
    if _PLUGINS in mistakes.refused:  # its options were not declared
        settings = [setting for setting in settings if not setting.name.startswith(f"{PREFIX}.")]
    return settings


def _aliases() -> Any:
    """Import and return `compat.aliases` (verl's names), only if needed."""
    from megatron_rl.compat import aliases

    return aliases


def _verl_defaults() -> Any:
    from megatron_rl.compat import verl_defaults

    return verl_defaults


def _is_ours(setting: Setting, fields: Mapping[str, FieldInfo]) -> bool:
    """Whether a setting is ours, not verl's: one of our names, with a value that has no special meaning in verl."""
    value = setting.value
    # Hydra marks a value that is given elsewhere with `???`; -1 is verl's "never", `~/` a user's home there.
    if setting.name not in fields or value in ("???", {}, -1):
        return False
    if value is None and not fields[setting.name].accepts_none:  # of earlier versions
        return False
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    return not any(text.startswith("~/") or text.endswith("_vectorized") for text in texts)


def _find_contradictions(settings: Sequence[Setting]) -> list[str]:
    values = {setting.name: setting for setting in settings}
    estimator, n = values.get("algorithm.adv_estimator"), values.get("rollout.n")
    names_critic = any(name.startswith("critic.") and one.layer != ASSUMED for name, one in values.items())
    if estimator is None or estimator.value != "gae" or names_critic:
        return []
    if n is None or not isinstance(n.value, int) or n.value == 1:
        return []
    return [
        f"contradiction: {describe(estimator)} needs a critic, and {describe(n)} asks for groups, as runs without a "
        "critic do; set algorithm.adv_estimator=grpo for such a run, or a setting of the section critic"
    ]


def _without_empty_sections(settings: list[Setting], mistakes: Mistakes) -> list[Setting]:
    sections = {*(name.rpartition(".")[0] for name in list_fields(sources=())), TEACHERS, PREFIX}
    for setting in settings:
        if setting.name in sections and setting.value not in (None, "hf_model"):  # a file of verl's
            error = UserError(
                f"the section {setting.name!r} has the value {setting.value!r}",
                source=setting.source,
                expected=f"settings below {setting.name}",
                hint=f"write {setting.name}.KEY=VALUE, see --help",
            )
            mistakes.errors.append(error)
    return [setting for setting in settings if setting.name not in sections]


def _gather_mappings(settings: list[Setting], fields: Mapping[str, FieldInfo]) -> list[Setting]:
    """Merge settings of a mapping's keys (`section.field.key`) into one of `section.field`; the last value is kept."""
    names = [name for name, info in fields.items() if info.is_mapping]
    gathered: dict[str, Setting] = {}
    others = []
    for setting in settings:
        name = next((name for name in names if f"{setting.name}.".startswith(f"{name}.")), None)
        if name is None:
            others.append(setting)
        elif setting.name == name:
            gathered[name] = setting
        else:
            before = gathered[name].value if name in gathered and isinstance(gathered[name].value, dict) else {}
            parts = _put(before, setting.name.removeprefix(f"{name}."), setting.value)
            gathered[name] = replace(setting, name=name, value=parts, text=None)
    return others + list(gathered.values())


def _put(mapping: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    key, _, rest = path.partition(".")
    inner = mapping.get(key)
    return {**mapping, key: _put(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


def _choose(settings: Sequence[Setting], fields: Mapping[str, FieldInfo], mistakes: Mistakes) -> dict[str, Setting]:
    """Choose one setting per name: the command line's last, else the recipe's; `weak` ones yield to others there."""
    chosen: dict[str, Setting] = {}
    for setting in settings:
        with mistakes.collect(setting.name):
            new = replace(setting, value=coerce(fields[setting.name], setting.value, setting.source, setting.text))
            old = chosen.get(new.name)
            strength = (new.layer, not new.weak)
            before = strength if old is None else (old.layer, not old.weak)
            if old is not None and before == strength and new.layer <= RECIPE and old.value != new.value:
                raise UserError(
                    f"{new.name} is given twice, as {old.value!r} and as {new.value!r}",
                    source=f"{old.source} and {new.source}",
                    expected="one value (a verl name and our name of the same setting must agree)",
                    hint="remove one of the two",
                )
            if before <= strength:
                chosen[new.name] = new
    return chosen


def _require_all(
    chosen: Mapping[str, Setting],
    fields: Mapping[str, FieldInfo],
    recipe: Path | Mapping[str, Any] | None,
    mistakes: Mistakes,
    implied: set[str],
) -> None:
    source = f"{recipe} and the command line" if recipe else "command line (no recipe)"
    source = "the config that was passed" if isinstance(recipe, Mapping) else source
    given = {*chosen, *mistakes.refused, *implied}
    missing = [info for name, info in fields.items() if info.required and name not in given]
    names = [info.name for info in missing]
    with mistakes.collect(*names):
        if missing:
            raise UserError(
                f"{', '.join(names)} {'is' if len(missing) == 1 else 'are'} missing",
                source=source,
                expected="; ".join(f"{info.name}: {info.describe_type()}" for info in missing),
                hint=f"add {names[0]} to the recipe or write {names[0]}=VALUE",
            )
