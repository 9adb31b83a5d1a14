# SPDX-License-Identifier: Apache-2.0
"""Settings of one source of prompts in `data.sources`, and the config of a run with this source alone."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from megatron_rl.config.sections import MISSING, option


@dataclass(frozen=True, kw_only=True)
class SourceReward:
    """The reward of one source of prompts; a rule, function or components replace the run's."""

    rule: Literal["exact", "math", "format", "by_data_source"] | None = option(None, "As reward.rule.")
    answer: Literal["marked", "any"] | None = option(None, "As reward.answer.")
    function: str | None = option(None, "As reward.function.")
    components: list[str] | None = option(None, "As reward.components, without reward models.")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of a mixture; null takes the setting of the same name in data, agents, reward or rollout."""

    files: list[str] = option(MISSING, "Its training prompts, as data.train_files.")
    weight: float = option(1.0, "Its share of the prompts, on any scale.", gt=0, hint="leave the source out")
    validation_files: list[str] = option(
        [], "As data.validation_files; one file is the set NAME, several are NAME-FILE."
    )
    system_prompt: str | None = option(None, "As data.system_prompt.")
    max_prompt_length: int | None = option(None, "As data.max_prompt_length, at most that.", "tokens", ge=1)
    max_response_length: int | None = option(None, "As data.max_response_length, at most that.", "tokens", ge=1)
    environment: str | None = option(None, "As agents.environment; it, tools or program replace the run's three.")
    tools: list[str] | None = option(None, "As agents.tools.")
    program: str | None = option(None, "As agents.program.")
    max_turns: int | None = option(None, "As agents.max_turns.", "replies", ge=1)
    turn_timeout_seconds: float | None = option(None, "As agents.turn_timeout_seconds.", "seconds", gt=0)
    reward: SourceReward = SourceReward()
    top_p: float | None = option(None, "As rollout.top_p.", gt=0, le=1)
    top_k: int | None = option(None, "As rollout.top_k.", "tokens")
    min_p: float | None = option(None, "As rollout.min_p.", ge=0, lt=1)
    min_tokens: int | None = option(None, "As rollout.min_tokens.", "tokens", ge=0)


# Settings of which a source's own replace all of the run's, and their values where the source has another of them.
_CHOICES: dict[str, dict[str, Any]] = {
    "agents": {"environment": None, "tools": [], "program": None},
    "reward": {"function": None, "components": [], "rule": "math"},
}


def list_own(source: SourceConfig, config: Any) -> dict[str, dict[str, Any]]:
    """Return the source's own settings: section -> leaf -> value."""
    own: dict[str, dict[str, Any]] = {}
    for section in ("data", "agents", "reward", "rollout"):
        values = source.reward if section == "reward" else source
        leaves = [item.name for item in fields(values) if hasattr(getattr(config, section), item.name)]
        own[section] = {leaf: value for leaf in leaves if (value := getattr(values, leaf)) is not None}
    return own


def split_sources(config: Any) -> dict[str, Any]:
    """Return the `RunConfig` of each source of `data.sources` by name, as if it were the only source of the run."""
    found = {}
    for name, source in config.data.sources.items():
        own = list_own(source, config)
        for section, others in _CHOICES.items():
            if own[section].keys() & others.keys():
                own[section] = others | own[section]
        own["data"] |= {"train_files": source.files, "sources": {}}
        found[name] = config.with_sections(own)
    return found
