# SPDX-License-Identifier: Apache-2.0
"""Mixtures of sources of prompts: the settings of `data.sources` by name, the config of each source, and their checks.

A source is checked as a run of its own: its config goes through the rules for episodes, rewards and sampling, and
errors name the source's setting, or the run's where the source has none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from megatron_rl.config.checked import CheckedConfig, Mistakes
from megatron_rl.config.feature_checks import check_agents, check_engine, check_sampling, check_thinking
from megatron_rl.config.fields import SOURCES, build_section
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections import LONGEST_PERIOD, MISSING, reduce_weights
from megatron_rl.config.source_settings import OWN, SourceConfig
from megatron_rl.config.sources import Setting, read_mapping
from megatron_rl.types import UserError

_LISTED = re.compile(r"data\.sources\[(\d+)\](?:\.(.+))?")
_NAME = re.compile(r"[\w-]+")


def name_sources(settings: Sequence[Setting], mistakes: Mistakes) -> list[Setting]:
    """Return the settings with entries of the list `data.sources` as settings `data.sources.NAME.key`.

    A later list replaces an earlier one. Mistakes are entries without a name, and names that are malformed or repeated.
    """
    others, listed = list[Setting](), list[Setting]()
    for setting in settings:
        if setting.name == SOURCES:
            others, listed = [one for one in others if not one.name.startswith(f"{SOURCES}.")], []
            for number, entry in enumerate(setting.value or ()):
                prefix = f"{SOURCES}[{number}]"
                parts = read_mapping(entry, mistakes, f"{prefix}.") if isinstance(entry, Mapping) else [None]
                listed += [
                    replace(setting, name=one.name if one else prefix, value=one.value if one else entry, text=None)
                    for one in parts
                ]
        else:
            (listed if _LISTED.fullmatch(setting.name) else others).append(setting)
    entries: dict[int, list[tuple[str, Setting]]] = {}
    for setting in listed:
        if parts := _LISTED.fullmatch(setting.name):
            entries.setdefault(int(parts[1]), []).append((parts[2] or "", setting))
    named, found = dict[str, str](), list[Setting]()
    for number, entry in entries.items():
        with mistakes.collect("data.train_files"):
            place, given = f"{SOURCES}[{number}] ({entry[0][1].source})", dict(entry)
            name = given["name"].value if "name" in given else None
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise UserError(
                    f"{given[''].value if '' in given else name!r} is no name of a source in {SOURCES}",
                    source=place,
                    expected="name: letters, digits, _ and -, and beside it files and other settings",
                    hint="e.g. {name: sums, files: [sums.jsonl], weight: 0.5}",
                )
            if name in named:
                raise UserError(
                    f"two sources are called {name!r}",
                    source=f"{named[name]} and {place}",
                    expected="each name once",
                    hint="rename one of the two",
                )
            if "files" not in given:
                raise UserError(
                    f"{SOURCES}.{name}.files is missing",
                    source=place,
                    expected="the files of its training prompts",
                    hint="add files: [FILE.jsonl]",
                )
            named[name] = place
            found += [replace(one, name=f"{SOURCES}.{name}.{key}") for key, one in entry if key != "name"]
    return found + others


def list_files(sources: Mapping[str, SourceConfig], leaf: str) -> list[str]:
    """Return the files of all sources: of training (`leaf` "files") or of validation ("validation_files")."""
    lists = (getattr(source, leaf) for source in sources.values())
    return [file for files in lists if files is not MISSING for file in files]


def add_sources(values: dict[str, Any], names: Sequence[str], places: Mapping[str, str]) -> list[str]:
    """Add the sources and the lists of all their files to the values of a config; return notes on replaced lists.

    Args:
        values: by full name.
        places: of the given settings.
    """
    sources = dict[str, SourceConfig]()
    for name in names:
        given = {leaf: values.get(f"{SOURCES}.{name}.{leaf}") for leaf in OWN}
        own = {leaf: value for leaf, value in given.items() if value is not None}
        sources[name] = replace(build_section(SourceConfig, f"{SOURCES}.{name}", values), own=own)
    notes, values[SOURCES] = list[str](), sources
    for setting, leaf in (("data.train_files", "files"), ("data.validation_files", "validation_files")):
        files = list_files(sources, leaf)
        if setting in places and values[setting] != files:
            notes.append(f"ignored: {setting}={values[setting]!r} ({places[setting]}), {SOURCES} has files of its own")
        values[setting] = files
    return notes


def _list_titles(config: RunConfig, name: str) -> dict[str, str]:
    """Return the settings of a source by the names that they have in its config."""
    names = {OWN[leaf]: leaf for leaf in config.data.sources[name].own}
    names |= {"data.train_files": "files", "data.validation_files": "validation_files"}
    return {setting: f"{SOURCES}.{name}.{leaf}" for setting, leaf in names.items()}


@contextmanager
def naming_source(config: RunConfig, source: str) -> Iterator[None]:
    """Name the source and its settings in a UserError that is raised in the `with` block."""
    try:
        yield
    except UserError as error:
        titles = _list_titles(config, source)
        place = re.sub(r"[a-z_]+\.[a-z_]+", lambda found: titles.get(found[0], found[0]), error.source)
        found = f"source {source}: {error.found}"
        raise UserError(found, source=place, expected=error.expected, hint=error.hint) from error


def check_sources(config: CheckedConfig, *rules: Callable[[CheckedConfig], None]) -> None:
    """Record the mistakes in the settings of `data.sources`, and settings that do not work with them.

    Args:
        rules: further rules for the config of each source.
    """
    run, sources = config.config, config.config.data.sources
    why = "beside data.sources, whose entries have files and weights of their own"
    config.apply(CheckedConfig.allow, "data.weights", None, why, "leave out data.sources")
    config.exclude(SOURCES, ("trainer.capture_step", None, "a capsule holds prompts of one kind"))
    config.require(
        run.layout.lengths is None,
        "layout.mode",
        f"has the lengths of one kind of response, and {SOURCES} of several",
        expected="given or auto",
        hint="leave the lengths out",
    )
    if not isinstance(run.data.shuffle, bool):
        why = "beside data.sources, which take turns by their weights"
        config.apply(CheckedConfig.allow, "data.shuffle", True, why, "leave out data.sources")
    config.apply(_check_period)
    for name, view in run.by_source.items():
        config.require(
            _NAME.fullmatch(name) is not None,
            f"{SOURCES}.{name}.files",
            f"belongs to a source with the name {name!r}",
            expected="letters, digits, _ and -",
            hint="the name becomes part of the names of settings and metrics",
        )
        mine = CheckedConfig(view, config.sources, config.mistakes, _list_titles(run, name))
        for rule in (check_agents, check_sampling, check_thinking, check_engine, *rules):
            mine.apply(rule)
        for leaf in ("max_prompt_length", "max_response_length"):
            mine.apply(_check_length, f"data.{leaf}", config.get(f"data.{leaf}"))
        mine.apply(_check_models, any(leaf.startswith("reward.") for leaf in sources[name].own))


def _check_period(config: CheckedConfig) -> None:
    names = [f"{SOURCES}.{name}.weight" for name in config.config.data.sources]
    weights = [config.get(name) for name in names]
    period = sum(reduce_weights(weights)) if min(weights) > 0 else 0
    config.require(
        period <= LONGEST_PERIOD,
        names[0],
        f"with {', '.join(map(str, weights[1:]))} of the others repeats after {period} prompts",
        expected=f"numbers whose proportions repeat within {LONGEST_PERIOD} prompts",
        hint="write fewer digits; they need not add up to 1: 2 and 1 for thirds",
    )


def _check_length(config: CheckedConfig, name: str, most: int) -> None:
    why, hint = f"is more than the run's {name} = {most}", f"raise {name}, which engine and training make room for"
    config.require(config.get(name) <= most, name, why, expected=f"at most {most}", hint=hint)


def _check_models(config: CheckedConfig, is_own: bool) -> None:
    """Refuse what scores or weighs all rollouts of a step alike in a mixture with rewards of its sources."""
    config.require(
        not is_own or not config.get("reward.models") and not config.config.reward_model.roles,
        "reward.components",
        "in a mixture with a reward model, which scores all prompts of a step alike",
        expected="rules, functions and services",
        hint="give the reward of all sources in the section reward, or leave the model out",
    )
    config.require(
        not is_own or config.get("algorithm.adv_estimator") != "gdpo" or config.get("algorithm.options.gdpo.rewards"),
        "reward.components",
        "in a mixture with gdpo, which weighs the components of all prompts of a step alike",
        expected="the components of gdpo by name",
        hint="set algorithm.options.gdpo.rewards=[accuracy,format], numbers that every source reports",
    )
