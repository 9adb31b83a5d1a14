# SPDX-License-Identifier: Apache-2.0
"""Prompts of a mixture of sources (`data.sources`): each source is read as a run of its own, then all are joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from megatron_rl.config.mixture import naming_source
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompts import PromptSet, name_files
from megatron_rl.rewards.scoring import RewardPlan
from megatron_rl.types import Prompt


def read_rewards(config: RunConfig, read: Callable[[RunConfig], RewardPlan]) -> dict[str, RewardPlan]:
    """Read the reward of each source of prompts; sources with equal settings share a plan (UserError: see `read`)."""
    plans = dict[str, RewardPlan]()
    known: list[tuple[RunConfig, RewardPlan]] = []
    for name, view in config.by_source.items():
        same = (
            plan
            for one, plan in known
            if (one.reward, one.data.max_response_length) == (view.reward, view.data.max_response_length)
        )
        plan = next(same, None)
        if plan is None:
            with naming_source(config, name):
                plan = read(view)
        known.append((view, plan))
        plans[name] = plan
    return plans


Inputs = tuple[PromptSet, dict[str, PromptSet], list[str]]  # training and validation prompts, and notes


def read_mixture(config: RunConfig, read: Callable[[str, RunConfig], Inputs]) -> Inputs:
    """Read and check the prompts of all sources in `data.sources` (UserError if any is wrong).

    Args:
        read: reads the prompts of a source by its name and config.
    """
    parts, sets, notes = dict[str, PromptSet](), list[PromptSet](), list[str]()
    for name, view in config.by_source.items():
        with naming_source(config, name):
            parts[name], validation, noted = read(name, view)
        notes += [f"source {name}: {note}" for note in noted]
        for found in validation.values():
            sets.append(replace(found, prompts=[replace(prompt, source=name) for prompt in found.prompts]))
    total = sum(source.weight for source in config.data.sources.values())
    for name, source in config.data.sources.items():
        notes.append(f"source {name}: {source.weight / total:.2%} of the prompts, from {len(parts[name].prompts)}")
    return join_sources(parts), dict(zip(list_validation(config), sets, strict=True)), notes


def list_validation(config: RunConfig) -> dict[str, str]:
    """Return the validation files by the names of their sets; of a source with one file, its name."""
    found: dict[str, str] = {}
    for source, view in config.by_source.items():
        for name, file in (named := name_files(view.data.validation_files)).items():
            found[f"{source}-{name}" if source and len(named) > 1 else source or name] = file
    return found


def join_sources(parts: Mapping[str, PromptSet]) -> PromptSet:
    """Join the prompts of sources, source after source, under ids of their own; each source counts as one file."""
    prompts, starts, first = list[Prompt](), list[int](), 0
    for name, part in parts.items():
        starts.append(first)
        prompts += [replace(one, prompt_id=first + one.prompt_id, source=name) for one in part.prompts]
        first += len(part.prompts) + part.num_dropped
    num_truncated = sum(part.num_truncated for part in parts.values())
    return PromptSet(prompts, num_truncated, sum(part.num_dropped for part in parts.values()), starts)
