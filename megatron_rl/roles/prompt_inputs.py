# SPDX-License-Identifier: Apache-2.0
"""The prompts of a run: read, chosen by pass rate, and checked against the files' weights and the reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.agents.environment import find_environment
from megatron_rl.agents.program import find_program
from megatron_rl.agents.tools.finding import describe_tools
from megatron_rl.agents.transcript import render_tail, rewrites_history
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
    data, tools = config.data, describe_tools(config.agents.tools)
    validation = {
        name: load_prompts([file], tokenizer, data, limit=data.validation_limit, tools=tools)
        for name, file in name_files(data.validation_files).items()
    }
    loaded = load_prompts(data.train_files, tokenizer, data, tools=tools)
    train, notes = select_by_pass_rate(loaded, data, shaping=OVERLONG)
    check_mixture(data, train.file_sizes)
    choose_teachers(config, train.prompts)
    prompts = [prompt for part in (train, *validation.values()) for prompt in part.prompts]
    notes += check_truths(reward_plan, prompts) + check_agents(config, tokenizer, train)
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


def check_agents(config: RunConfig, tokenizer: Tokenizer, prompts: PromptSet) -> list[str]:
    """A note where the chat template renders earlier replies in another way than they were sampled.

    Raises:
        UserError: what makes the episodes is not there, or the template does not show tools, or contents as they are.
    """
    agents, chats = config.agents, [prompt.messages for prompt in prompts.prompts if prompt.messages]
    if agents.environment is not None:
        find_environment(agents.environment)
    if agents.program is not None:
        find_program(agents.program)
    options = config.data.apply_chat_template_kwargs
    if agents.tools:
        _check_tools(prompts, tokenizer, options)
    if not agents.has_episodes or not chats:
        return []
    render_tail(tokenizer, chats[0], [{"role": "user", "content": "further"}], options)
    if not rewrites_history(tokenizer, options):
        return []
    does = "are kept as they were sampled" if agents.history == "keep" else "are rendered again: an episode forks there"
    return [f"the chat template leaves thoughts out of earlier replies, which {does} (agents.history={agents.history})"]


def _check_tools(prompts: PromptSet, tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
    """Refuse prompts that cannot show tools (UserError)."""
    texts = [prompt for prompt in prompts.prompts if prompt.messages is None]
    shown = prompts.prompts[0]
    hides = not texts and shown.text == tokenizer.apply_chat_template(shown.messages or [], **options)
    if texts or hides:
        raise UserError(
            "the chat template does not show tools" if hides else "a prompt is plain text, which shows no tools",
            source="agents.tools",
            expected="chat messages, and a chat template that knows tools",
            hint="take an environment that says in the prompt how it is asked, or the template of another model",
        )
