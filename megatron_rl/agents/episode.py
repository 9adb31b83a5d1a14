# SPDX-License-Identifier: Apache-2.0
"""One episode as its process runs it, and its messages to the rank."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

from megatron_rl.agents.environment import Done, Environment, Reply, Task, check_answer, find_environment
from megatron_rl.agents.tool_formats import AUTO, find_tool_format, read_reply
from megatron_rl.agents.tools.finding import find_tools
from megatron_rl.agents.tools.tool import ToolEnvironment
from megatron_rl.agents.transcript import ChatTranscript, Tail, TextTranscript
from megatron_rl.config.sections import SandboxConfig
from megatron_rl.data.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.types import Prompt

_LONGEST_TRACE = 2000


@dataclass(frozen=True)
class Setup:
    """Settings that all episodes of a run share."""

    # environment, program, tools: settings in `agents`; exactly one is set.
    environment: str | None
    tokenizer: str  # path
    options: dict[str, Any]  # chat-template arguments
    stop_token_ids: tuple[int, ...]
    follows_template: bool  # whether `agents.history` is "template"
    max_turns: int
    run_seed: int
    program: str | None = None
    tools: tuple[str, ...] = ()
    temperature: float = 1.0
    context_length: int = 0  # maximum tokens of a prompt and its response
    tool_format: str | None = AUTO  # `agents.tool_format`; workers resolve "auto"
    reads_marks: bool = False  # `data.special_tokens_in_contents`
    sandbox: SandboxConfig | None = None

    @property
    def source(self) -> str:
        """Return the one of environment, program and tools that is set, as "agents.NAME = value", for messages."""
        settings = {"environment": self.environment, "program": self.program, "tools": ", ".join(self.tools)}
        return next(f"agents.{name} = {value}" for name, value in settings.items() if value)


@dataclass(frozen=True)
class Opening:
    """The start of an episode; `tokens` encode the task's prompt."""

    task: Task
    tokens: list[int]

    @classmethod
    def of(cls, prompt: Prompt, run_seed: int) -> Opening:
        """Build the opening for a prompt."""
        seed = int.from_bytes(blake2b(f"{run_seed}/{prompt.prompt_id}".encode(), digest_size=4).digest(), "big")
        task = Task(
            prompt.text,
            prompt.ground_truth,
            prompt.data_source,
            dict(prompt.extra_info),
            dict(prompt.row),
            seed,
            prompt.messages,
            prompt.tools,
        )
        return cls(task, prompt.tokens.tolist())


@dataclass(frozen=True)
class Answer:
    """An episode's answer to a reply; the first answer precedes any reply.

    Attributes:
        tail: tokens before the next reply, or `None` at the end.
        reward: of the reply, if any.
        seconds: time spent in the environment.
        finish_reason: "turns", "timeout" or "error" if the environment did not end the episode; after the last two only
            `failure` is valid.
        max_tokens: limit of the next reply, or `None` for the context limit.
        state: name of the state that the next reply answers (`Observation.state`); `None`: the tokens of `tail`.
        began: when the environment began, by `time.monotonic`; 0 if it did not.
        calls: name, start and end of its tool calls.
    """

    tail: Tail | None = None
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    finish_reason: str | None = None
    failure: str = ""
    max_tokens: int | None = None
    state: str | None = None
    began: float = 0.0
    calls: Sequence[tuple[str, float, float]] = ()

    @classmethod
    def of_done(cls, done: Done, seconds: float, **times: Any) -> Answer:
        """Build the last answer of an episode."""
        reward = None if done.reward is None else float(done.reward)
        return cls(None, reward, {name: float(value) for name, value in done.components.items()}, seconds, **times)

    @classmethod
    def of_error(cls) -> Answer:
        """Build an answer from the exception being handled."""
        return cls(finish_reason="error", failure=traceback.format_exc()[-_LONGEST_TRACE:])


def read_tokenizer(setup: Setup) -> tuple[Setup, Tokenizer]:
    """Load the tokenizer; return it with the setup, with "auto" resolved to a tool format (UserError)."""
    tokenizer = load_tokenizer(Path(setup.tokenizer), reads_marks=setup.reads_marks)
    tokenizer.encode_rendered("")  # its tables of marks are made here, not in each of the forks
    if setup.tool_format == AUTO:
        setup = replace(setup, tool_format=find_tool_format(tokenizer, setup.options))
    return setup, tokenizer


def find_environments(setup: Setup) -> Callable[[], Environment]:
    """Return the episodes' environment factory; raises UserError."""
    if setup.environment is not None:
        return find_environment(setup.environment)
    tools = find_tools(setup.tools)
    calls = {tool.name: tool.load() for tool in tools}
    in_sandbox = {tool.name: tool.in_sandbox for tool in tools if tool.in_sandbox is not None}
    return lambda: ToolEnvironment(calls, in_sandbox)


def play_environment(
    make_environment: Callable[[], Environment], setup: Setup, tokenizer: Tokenizer, opening: Opening
) -> Generator[Answer, tuple[list[int], str]]:
    """Play an episode as a generator: yield the first answer, then an answer to each reply sent to the generator.

    A reply is sent as (tokens, finish reason).
    """
    task, environment = opening.task, make_environment()
    if task.messages is None:
        transcript = TextTranscript(tokenizer)
    else:
        transcript = ChatTranscript(
            tokenizer,
            task.messages,
            setup.options | ({"tools": task.tools} if task.tools else {}),
            setup.stop_token_ids,
            follows_template=setup.follows_template,
        )
    started = time.monotonic()
    found = check_answer(environment.reset(task))
    if isinstance(found, Done):
        raise TypeError("reset returned Done: an episode has at least one reply")
    seconds = time.monotonic() - started
    answer = Answer(transcript.begin(found.messages), seconds=seconds, began=started, state=found.state)
    for turn in count(1):
        tokens, finish_reason = yield answer
        _, calls = read_reply(tokenizer, setup.tool_format, tokens, task.tools)
        reply, started = Reply(tokenizer.decode(tokens), calls, finish_reason), time.monotonic()
        found = check_answer(environment.step(reply))
        seconds = time.monotonic() - started
        reward = None if found.reward is None else float(found.reward)
        made = environment.take_calls() if isinstance(environment, ToolEnvironment) else ()
        times: dict[str, Any] = {"seconds": seconds, "began": started, "calls": made}
        if isinstance(found, Done):
            answer = Answer.of_done(found, **times)
        elif turn == setup.max_turns:
            answer = Answer(None, reward, finish_reason="turns", **times)
        else:
            # The i-th message of role "tool" gets the id of the i-th call, which some chat templates require.
            ids = iter([call.id for call in calls])
            messages = [
                {"tool_call_id": next(ids, ""), **message} if message["role"] == "tool" else message
                for message in found.messages
            ]
            said = "\0".join(message["content"] for message in messages)
            state = said if found.state is None else found.state
            answer = Answer(transcript.extend(tokens, messages), reward, state=state, **times)
