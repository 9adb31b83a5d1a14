# SPDX-License-Identifier: Apache-2.0
"""The section `agents`: episodes of several turns with an environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.declaring import option


@dataclass(frozen=True, kw_only=True)
class AgentsConfig:
    """Episodes: an environment answers the policy's replies until it says that the episode is done."""

    environment: str | None = option(
        None,
        "calculator, textarena:GAME, gem:GAME, openenv:URL, or a class of yours as path.py:Name; null: one response "
        "per prompt, unless there are tools or a program.",
    )
    tools: list[str] = option(
        [],
        "In place of an environment, tools that the chat template shows and replies call: calculator, python, "
        "search:CORPUS.jsonl, mcp:COMMAND, or functions of yours as path.py:function.",
    )
    tool_format: Literal["auto", "hermes", "qwen3_coder", "glm", "deepseek", "mistral", "llama3"] = option(
        "auto", "How replies write tool calls; auto: as the chat template writes earlier calls."
    )
    program: str | None = option(
        None,
        "In place of an environment, a function agent(task, base_url) of yours as path.py:function or module:function; "
        "it talks to the policy by any OpenAI client.",
    )
    max_turns: int = option(8, "Replies of an episode; data.max_response_length bounds its tokens.", "replies")
    episode_timeout_seconds: float = option(
        300.0,
        "Time that an environment or a program may take for all its answers in an episode, set-up included; then it is "
        "killed.",
        "seconds",
    )
    turn_timeout_seconds: float = option(60.0, "Time for one of them.", "seconds")
    workers: int = option(1, "Parent processes per engine; each episode is forked from one of them.", "processes")
    episodes_in_flight: int | None = option(
        None, "Episodes of one engine that are open at a time; default: all of a step.", "episodes"
    )
    history: Literal["keep", "template"] = option(
        "keep",
        "A chat template that renders earlier replies in another way than they were sampled (without thoughts): keep "
        "the tokens as they were sampled, or do as the template does, which forks the episode.",
    )

    @property
    def has_episodes(self) -> bool:
        """True if an environment, tools or a program make episodes of several turns."""
        return self.environment is not None or self.program is not None or bool(self.tools)
