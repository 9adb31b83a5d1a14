# SPDX-License-Identifier: Apache-2.0
"""Checks of an agent run before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.agents.environment import find_environment
from megatron_rl.agents.program import find_program
from megatron_rl.agents.tool_formats import AUTO, find_tool_format, require_format, require_shown, shows_tools
from megatron_rl.agents.tools.finding import describe_gaps, describe_tools
from megatron_rl.agents.transcript import render_tail, rewrites_history
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections import AgentsConfig
from megatron_rl.data.prompts import PromptSet
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.types import UserError


def check_episodes(config: RunConfig, tokenizer: Tokenizer, prompts: PromptSet) -> list[str]:
    """Return notes on the tool-call format, missing sandbox layers, and templates that rewrite earlier replies.

    Raises:
        UserError: the environment, program or a tool is missing, or the chat template omits tools or alters contents.
    """
    agents, chats = config.agents, [prompt.messages for prompt in prompts.prompts if prompt.messages]
    if agents.program is not None:
        find_program(agents.program)
    options = config.data.apply_chat_template_kwargs
    if list_tools(agents):
        _check_tools(prompts, tokenizer, options)
    if not chats:
        return []
    render_tail(tokenizer, chats[0], [{"role": "user", "content": "further"}], options)
    has_tools = any(prompt.tools for prompt in prompts.prompts)
    notes = _describe_calls(agents, tokenizer, options, has_tools) if has_tools or agents.program else []
    notes += describe_gaps(agents.tools)
    if rewrites_history(tokenizer, options):
        keeps = agents.history == "keep"
        does = "are kept as they were sampled" if keeps else "are rendered again: an episode forks there"
        which = f"(agents.history={agents.history})"
        notes += [f"the chat template leaves thoughts out of earlier replies, which {does} {which}"]
    return notes


def list_tools(agents: AgentsConfig) -> list[dict[str, Any]]:
    """Return the tools for the chat template, from `agents.tools` or from the environment."""
    if agents.environment is None:
        return describe_tools(agents.tools)
    return getattr(find_environment(agents.environment), "tools", [])


def _describe_calls(
    agents: AgentsConfig, tokenizer: Tokenizer, options: Mapping[str, Any], has_tools: bool
) -> list[str]:
    """Return notes on the tool-call format (UserError if tools need an unsupported one)."""
    found = find_tool_format(tokenizer, options) if agents.tool_format == AUTO else agents.tool_format
    if has_tools:
        found = require_format(found, "agents.tool_format = auto")
    notes = [f"replies call tools in the format {found} (agents.tool_format)"] if found else []
    if agents.program is not None and not shows_tools(tokenizer, options):
        notes += ["the chat template does not show tools: a request of the program that has some is refused"]
    return notes


def _check_tools(prompts: PromptSet, tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
    texts = [prompt for prompt in prompts.prompts if prompt.messages is None]
    shown = prompts.prompts[0]
    hides = not texts and shown.text == tokenizer.apply_chat_template(shown.messages or [], **options)
    if texts:
        raise UserError(
            "a prompt is plain text, which shows no tools",
            source="agents.tools",
            expected="chat messages, and a chat template that knows tools",
            hint="use an environment whose prompt describes its calls, or the template of another model",
        )
    require_shown(not hides, "agents.tools")
