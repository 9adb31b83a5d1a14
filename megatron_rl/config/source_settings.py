# SPDX-License-Identifier: Apache-2.0
"""Settings of one source of prompts in `data.sources`, and the config of a run with this source alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config.sections import MISSING, option


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of a mixture, with settings of the run that it has for itself."""

    files: list[str] = option(
        MISSING, "Its training prompts, as data.train_files; beside them, settings of its own (docs/recipes.md)."
    )
    weight: float = option(1.0, "Its share of the prompts, on any scale.", gt=0, hint="leave the source out")
    validation_files: list[str] = option(
        [], "As data.validation_files; one file is the set NAME, several are NAME-FILE."
    )
    own: Mapping[str, Any] = option({}, "")  # name in `OWN` -> value


# Settings of the run that a source may have for itself, by the names that they have in its entry.
OWN = {
    f"reward.{leaf}" if section == "reward" else leaf: f"{section}.{leaf}"
    for section, leaves in {
        "data": ("system_prompt", "max_prompt_length", "max_response_length"),
        "agents": ("environment", "tools", "program", "max_turns", "turn_timeout_seconds"),
        "reward": ("function", "components"),
        "rollout": ("top_p", "top_k", "min_p", "min_tokens"),
    }.items()
    for leaf in leaves
}
# Settings of which a source's own replace all of the run's, and their values where the source has another of them.
_CHOICES: dict[str, dict[str, Any]] = {
    "agents": {"environment": None, "tools": [], "program": None},
    "reward": {"function": "math", "components": []},
}


def read_own_fields(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `OWN` of the source `name` by full name, as `fields` declares them, each null by default."""
    titles = {f"data.sources.{name}.{leaf}": fields[setting] for leaf, setting in OWN.items()}
    return {
        title: replace(info, name=title, annotation=info.annotation | None, default=None)
        for title, info in titles.items()
    }


def split_sources(config: Any) -> dict[str, Any]:
    """Return the `RunConfig` of each source of `data.sources` by name, as if it were the only source of the run."""
    found = {}
    for name, source in config.data.sources.items():
        own: dict[str, dict[str, Any]] = {"data": {"train_files": source.files, "sources": {}}}
        own["data"]["validation_files"] = source.validation_files
        for title, value in source.own.items():
            section, _, leaf = OWN[title].partition(".")
            own.setdefault(section, {})[leaf] = value
        for section, others in _CHOICES.items():
            if own.get(section, {}).keys() & others.keys():
                own[section] = others | own[section]
        found[name] = config.with_sections(own)
    return found
