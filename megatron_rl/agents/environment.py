# SPDX-License-Identifier: Apache-2.0
"""What an environment is, and the registry in which `agents.environment` is looked up.

An environment answers the replies of the policy until it says that the episode is done. Each episode has an instance
of its own, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, cast

from megatron_rl.agents.transcript import Message
from megatron_rl.extension.user_code import import_file
from megatron_rl.rewards.scoring import LARGEST, check_name
from megatron_rl.types import UserError

SETTING = "agents.environment"


@dataclass(frozen=True)
class Task:
    """What an episode is about.

    Attributes:
        prompt: as the policy is shown it.
        ground_truth, data_source, extra_info, row: see `types.Prompt`.
        seed: the same for all episodes on a prompt; Python's `random` has it already.
        messages: the prompt as chat messages; None: it is plain text.
        tools: of a chat, in the form of OpenAI's API.
    """

    prompt: str
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any]
    row: dict[str, Any]
    seed: int
    messages: list[Message] | None = None
    tools: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class ToolCall:
    """What a reply asks for; `arguments` is None where it has no name and arguments. The id is for chat templates."""

    name: str
    arguments: dict[str, Any] | None
    id: str = ""


@dataclass(frozen=True)
class Reply:
    """What the policy said.

    Attributes:
        text: without special tokens.
        tool_calls: what it wrote in the format `agents.tool_format`.
        finish_reason: "stop", or "length" where it was cut.
    """

    text: str
    tool_calls: list[ToolCall]
    finish_reason: str


@dataclass(frozen=True)
class Observation:
    """The episode continues.

    Attributes:
        messages: that the policy sees next, each with "role" and "content".
        reward: of this turn, if it has one.
    """

    messages: list[Message]
    reward: float | None = None


@dataclass(frozen=True)
class Done:
    """The episode is over.

    Attributes:
        reward: of the last turn, if it has one; the episode's is the sum over its turns. An episode without any is
            scored by the run's reward sources, which are told the last reply.
        components: name -> value, logged as reward/<name>.
    """

    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode. A class with these methods and without arguments is all that is asked for."""

    def reset(self, task: Task) -> Observation:
        """The episode begins: messages behind the task's own, mostly none."""
        ...

    def step(self, reply: Reply) -> Observation | Done:
        """Answer a reply."""
        ...


# Name -> module and class; "path.py:Name" is the user's.
ENVIRONMENTS = {"calculator": ("megatron_rl.agents.calculator", "Calculator")}
# Prefix of a name -> module and function(prefix, rest) that finds it.
ADAPTERS = {
    "textarena": ("megatron_rl.agents.adapters.games", "find_game"),
    "gem": ("megatron_rl.agents.adapters.games", "find_game"),
    "openenv": ("megatron_rl.agents.adapters.openenv", "find_server"),
}


def find_environment(name: str) -> Callable[[], Environment]:
    """What makes the environment of a name.

    Raises:
        UserError: there is none, or it lacks a method.
    """
    if name in ENVIRONMENTS:
        module, attribute = ENVIRONMENTS[name]
        return getattr(import_module(module), attribute)
    kind, _, rest = name.partition(":")
    if kind in ADAPTERS:
        module, attribute = ADAPTERS[kind]
        return getattr(import_module(module), attribute)(kind, rest)
    path, _, attribute = name.rpartition(":")
    expected = ", ".join(["path.py:Name", *ENVIRONMENTS, *(f"{kind}:NAME" for kind in ADAPTERS)])
    if not path or not attribute:
        raise UserError(
            f'"{name}" names no environment',
            source=SETTING,
            expected=expected,
            hint="write the file and the class, e.g. my_environment.py:Game",
        )
    found = getattr(import_file(path, SETTING, expected), attribute, None)
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if missing:
        raise UserError(
            f'the file defines no "{attribute}"' if found is None else f'"{attribute}" has no method {missing[0]}',
            source=f"{SETTING} = {name}",
            expected="a class with reset(task) and step(reply)",
            hint="see docs/agents.md",
        )
    return cast(Callable[[], Environment], found)


def check_answer(answer: Any) -> Observation | Done:
    """What an environment returned, if it is what it may return.

    Raises:
        TypeError: it is not; the message says how.
        ValueError: a reward or a component is no finite number, or too large to be added up; a component has no name
            that a metric can have.
    """
    if not isinstance(answer, Observation | Done):
        raise TypeError(f"a {type(answer).__name__} instead of Observation or Done")
    numbers = [("reward", answer.reward)] if answer.reward is not None else []
    if isinstance(answer, Done):
        numbers += [(check_name(name), value) for name, value in answer.components.items()]
    else:
        for message in answer.messages:
            texts = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError(f"the message {str(message)[:100]!r} without a role and a content that are texts")
    for name, value in numbers:
        if not abs(value) <= LARGEST:
            raise ValueError(f"{name} = {value}; numbers are at most {LARGEST:g} in size, so that sums are finite")
    return answer
