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
        "calculator, textarena:GAME, gem:GAME, openenv:URL, or your class as path.py:Name; null: one response per "
        "prompt.",
    )
    tools: list[str] = option(
        [],
        "Instead of an environment, tools that replies call: calculator, python, search:CORPUS.jsonl, mcp:COMMAND,"
        " or your path.py:function.",
    )
    tool_format: Literal["auto", "hermes", "qwen3_coder", "glm", "deepseek", "mistral", "llama3"] = option(
        "auto", "How replies write tool calls; auto: as the chat template writes earlier calls."
    )
    program: str | None = option(
        None,
        "Instead of an environment, your agent(task, base_url) as path.py:function or module:function, which talks"
        " to the policy by any OpenAI client.",
    )
    max_turns: int = option(8, "Replies of an episode; data.max_response_length bounds its tokens.", "replies", ge=1)
    episode_timeout_seconds: float = option(
        300.0,
        "Time of an environment or a program for all its answers in an episode, set-up included; then it is killed.",
        "seconds",
        gt=0,
    )
    turn_timeout_seconds: float = option(60.0, "Time for one of them.", "seconds", gt=0)
    workers: int = option(1, "Parent processes per engine; each episode is forked from one of them.", "processes", ge=1)
    episodes_in_flight: int | None = option(None, "Open episodes per engine; default: all of a step.", "episodes", ge=1)
    history: Literal["keep", "template"] = option(
        "keep",
        "Where the chat template renders earlier replies differently than they were sampled: keep the tokens, or "
        "follow the template, which forks the episode.",
    )

    @property
    def has_episodes(self) -> bool:
        """True if an environment, tools or a program make episodes of several turns."""
        return self.environment is not None or self.program is not None or bool(self.tools)
