# SPDX-License-Identifier: Apache-2.0
"""The prompts of a run: read, chosen by pass rate, and checked against the files' weights and the reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config.data import DataConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.pass_rates import select_by_pass_rate
from megatron_rl.data.prompts import PromptSet, load_prompts, name_files
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.rewards.plan import OVERLONG, RewardPlan
from megatron_rl.rewards.truths import check_truths
from megatron_rl.roles.teacher_inputs import choose_teachers
from megatron_rl.types import UserError


@dataclass(frozen=True)
class PromptInputs:
    """Prompts to train on and to validate on, the latter by set, and what is to be said of them, one line each."""

    train: PromptSet
    validation: dict[str, PromptSet]
    notes: list[str]


def read_prompts(config: RunConfig, tokenizer: Tokenizer, reward_plan: RewardPlan) -> PromptInputs:
    """Read and check all prompts.

    Raises:
        UserError: a file, a row or a measured pass rate that is wrong or missing, ground truths that the reward
            cannot use, or a prompt without a teacher.
    """
    data, tools, has_episodes = config.data, [], config.agents.has_episodes
    if has_episodes:
        from megatron_rl.agents import start_checks

        tools = start_checks.list_tools(config.agents)
    validation = {
        name: load_prompts([file], tokenizer, data, limit=data.validation_limit, tools=tools)
        for name, file in name_files(data.validation_files).items()
    }
    loaded = load_prompts(data.train_files, tokenizer, data, tools=tools)
    train, notes = select_by_pass_rate(loaded, data, shaping=OVERLONG)
    check_mixture(data, train.file_sizes)
    choose_teachers(config, train.prompts)
    prompts = [prompt for part in (train, *validation.values()) for prompt in part.prompts]
    notes += check_truths(reward_plan, prompts)
    if has_episodes:
        notes += start_checks.check_episodes(config, tokenizer, train)
    return PromptInputs(train, validation, notes)


def check_mixture(config: DataConfig, sizes: Sequence[int]) -> None:
    """Refuse weights of files of which one has no prompt (UserError)."""
    empty = [file for file, size in zip(config.train_files, sizes, strict=True) if not size]
    if config.weights is not None and empty:
        raise UserError(
            f"no prompt of {', '.join(empty)} is left",
            source="data.weights and data.train_files",
            expected="a prompt in each file that has a weight",
            hint="raise data.max_prompt_length, widen data.pass_rate_range, or leave out the file and its weight",
        )
