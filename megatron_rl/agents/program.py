# SPDX-License-Identifier: Apache-2.0
"""Runs a user's program as the agent: `agent(task, base_url) -> reward`, in its episode's process.

OPENAI_BASE_URL and OPENAI_API_KEY are set for the episode's endpoint, so `openai.OpenAI()` needs no arguments; nor does
`anthropic.Anthropic()`, by variables of its own.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any, cast

from megatron_rl.agents.endpoint import Endpoint, Sample
from megatron_rl.agents.environment import Done, Task, check_answer, find_environment
from megatron_rl.agents.episode import Answer, Opening, Setup
from megatron_rl.agents.requests import EndpointServer
from megatron_rl.agents.tool_formats import AUTO, find_tool_format, require_format, require_shown, shows_tools
from megatron_rl.agents.tools.finding import describe_gaps, describe_tools
from megatron_rl.agents.transcript import Tail, render_tail, rewrites_history
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections import AgentsConfig
from megatron_rl.data.prompts import PromptSet
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.extension.user_code import import_file
from megatron_rl.types import UserError

SETTING = "agents.program"
Result = float | Done | None
Program = Callable[[Task, str], Result | Awaitable[Result]]

_EXPECTED = "path.py:function, or module:function"


def find_program(name: str) -> Program:
    """Import the function that `agents.program` names (UserError if there is none)."""
    if name.startswith("verifiers:"):
        return cast(Program, find_environment(name)())
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise UserError(f'"{name}" names no function', source=SETTING, expected=_EXPECTED, hint="see docs/agents.md")
    if place.endswith(".py"):
        module = import_file(place, SETTING, _EXPECTED)
    else:
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise UserError(
                f"importing {place} raised {type(error).__name__}: {error}",
                source=SETTING,
                expected=_EXPECTED,
                hint="install what is missing, or correct the name",
            ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise UserError(
            f'"{place}" defines no function "{attribute}"',
            source=f"{SETTING} = {name}",
            expected="async def agent(task, base_url), or without async",
            hint="see docs/agents.md",
        )
    return cast(Program, found)


class _Rank:
    """A program's connection to the training rank that samples its replies."""

    def __init__(self, connection: Connection, max_turns: int) -> None:
        self._connection, self._max_turns = connection, max_turns
        self.num_turns, self._since = 0, time.monotonic()

    def sample(self, tokens: list[int], max_tokens: int | None) -> Sample:
        """Return the policy's reply to a prompt; after `max_turns` replies the episode is killed, with reward 0."""
        is_over = self.num_turns == self._max_turns
        self._connection.send(
            Answer(
                None if is_over else Tail(tokens, is_fork=True),
                reward=0.0 if is_over else None,
                seconds=time.monotonic() - self._since,
                began=self._since,
                finish_reason="turns" if is_over else None,
                max_tokens=max_tokens,
            )
        )
        found = Sample(*self._connection.recv())
        self.num_turns, self._since = self.num_turns + 1, time.monotonic()
        return found

    def end(self, done: Done) -> None:
        self._connection.send(Answer.of_done(done, time.monotonic() - self._since, began=self._since))


def run_program(connection: Connection, program: Program, setup: Setup, tokenizer: Tokenizer, opening: Opening) -> None:
    """Run an episode; errors of the program are raised.

    Raises:
        TypeError, ValueError: the program returned no valid reward.
        UserError: the program failed after the endpoint refused a request with tools.
    """
    rank = _Rank(connection, setup.max_turns)
    endpoint = Endpoint(setup, tokenizer, opening, rank.sample)
    server = EndpointServer(endpoint.list_models, endpoint.answer)
    base_url = f"{server.url}/v1"
    os.environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": server.token}
    os.environ |= {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": server.token}
    box = opening.task.sandbox
    try:
        if box is not None and (listener := box.listen(server.server_address[1])) is not None:
            server.serve_on(listener)  # a program in the sandbox has the endpoint at the same address
        result = program(opening.task, base_url)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
        if not rank.num_turns:
            raise RuntimeError("the program has ended without a request to its endpoint")
        if isinstance(result, bool | int | float):
            result = Done(float(result))
        done = check_answer(Done() if result is None else result)
        if not isinstance(done, Done):
            raise TypeError("an Observation instead of a reward")
    except Exception as error:
        if endpoint.refusal is not None:  # a four-part error is clearer than the program's own error about status 400
            raise endpoint.refusal from error
        raise
    finally:
        endpoint.close()  # so that no message follows the result
    rank.end(done)


async def _wait(result: Awaitable[Any]) -> Any:
    return await result


def check_episodes(config: RunConfig, tokenizer: Tokenizer, prompts: PromptSet) -> list[str]:
    """Return notes on the tool-call format, missing sandbox layers, and templates that rewrite earlier replies.

    Raises:
        UserError: the environment, program or a tool is missing, or the chat template omits tools or alters contents.
    """
    agents, chats = config.agents, [prompt.messages for prompt in prompts.prompts if prompt.messages]
    program = agents.program_or_taskset
    if program is not None:
        find_program(program)
    notes: list[str] = []
    if agents.sandbox.kind is not None:
        from megatron_rl.agents.sandbox import check_sandbox

        notes += check_sandbox(agents.sandbox)
        if program is not None and agents.sandbox.kind != "local" and not agents.sandbox.network:
            notes += ["agents.sandbox.network = false: a program in a container does not reach its endpoint"]
    options = config.data.apply_chat_template_kwargs
    if list_tools(agents):
        if any(prompt.messages is None for prompt in prompts.prompts):
            raise UserError(
                "a prompt is plain text, which shows no tools",
                source="agents.tools",
                expected="chat messages, and a chat template that knows tools",
                hint="use an environment whose prompt describes its calls, or the template of another model",
            )
        shown = prompts.prompts[0]
        without_tools = tokenizer.apply_chat_template(shown.messages or [], **options)
        require_shown(shown.text != without_tools, "agents.tools")
    if not chats:
        return notes
    render_tail(tokenizer, chats[0], [{"role": "user", "content": "further"}], options)
    has_tools = any(prompt.tools for prompt in prompts.prompts)
    if has_tools or program:
        found = find_tool_format(tokenizer, options) if agents.tool_format == AUTO else agents.tool_format
        if has_tools:
            found = require_format(found, "agents.tool_format = auto")
        notes += [f"replies call tools in the format {found} (agents.tool_format)"] if found else []
        if program is not None and not shows_tools(tokenizer, options):
            notes += ["the chat template does not show tools: a request of the program that has some is refused"]
    notes += describe_gaps(agents.tools)
    if rewrites_history(tokenizer, options):
        keeps = agents.history == "keep"
        does = "are kept as they were sampled" if keeps else "are rendered again: an episode forks there"
        which = f"(agents.history={agents.history})"
        notes += [f"the chat template leaves thoughts out of earlier replies, which {does} {which}"]
    return notes


def list_tools(agents: AgentsConfig) -> list[dict[str, Any]]:
    """Return the tools for the chat template, from `agents.tools` or from the environment."""
    if agents.environment is None or agents.program_or_taskset is not None:
        return describe_tools(agents.tools)
    return getattr(find_environment(agents.environment), "tools", [])
