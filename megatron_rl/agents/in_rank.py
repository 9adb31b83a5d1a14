# SPDX-License-Identifier: Apache-2.0
"""Runs environments in the rank's own process, so that its debugger stops in them.

Random numbers are the same as in `processes`, but there are no deadlines, module variables are shared, and an
environment that ends its process ends the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Hashable
from typing import Any

import numpy as np

from megatron_rl.agents.environment import Environment
from megatron_rl.agents.episode import Answer, Opening, Setup, play_environment
from megatron_rl.agents.processes import EpisodeProcesses
from megatron_rl.agents.worker import find_environments, read_tokenizer
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.parallel.random_streams import keep_random_streams
from megatron_rl.types import Prompt

_Answers = Generator[Answer, tuple[list[int], str]]


class _Episode:
    def __init__(self, answers: _Answers, seed: int) -> None:
        self._answers = answers
        self._python, self._numpy = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()

    def ask(self, question: Callable[[_Answers], Answer]) -> Answer:
        """Advance the episode under its own random state."""
        with keep_random_streams():
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                return question(self._answers)
            except (Exception, SystemExit):  # environments can raise anything
                return Answer.of_error()
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()


class EpisodesInRank:
    """A synchronous drop-in for `EpisodeProcesses` without support for programs."""

    def __init__(self, setup: Setup) -> None:
        self._given = setup
        self._found: tuple[Callable[[], Environment], Setup, Tokenizer] | None = None
        self._episodes: dict[Hashable, _Episode] = {}
        self._answers: dict[Hashable, Answer] = {}

    def open(self, key: Hashable, prompt: Prompt) -> None:
        """Start an episode and compute its first answer (UserError if the environment cannot be imported)."""
        if self._found is None:
            self._found = find_environments(self._given), *read_tokenizer(self._given)
        opening = Opening.of(prompt, self._given.run_seed)
        self._episodes[key] = _Episode(play_environment(*self._found, opening), opening.task.seed)
        self._answers[key] = self._episodes[key].ask(next)

    def send_reply(self, key: Hashable, tokens: list[int], logprobs: list[float], finish_reason: str) -> None:
        """Send a reply and compute the answer."""
        self._answers[key] = self._episodes[key].ask(lambda answers: answers.send((tokens, finish_reason)))

    def wait(self) -> dict[Any, Answer]:
        """Return new answers, by key."""
        found, self._answers = self._answers, {}
        return found

    def close(self, key: Hashable) -> None:
        """Drop an episode."""
        self._episodes.pop(key, None)
        self._answers.pop(key, None)

    def close_all(self) -> None:
        """Drop all episodes."""
        self._episodes.clear()
        self._answers.clear()


AnyEpisodes = EpisodeProcesses | EpisodesInRank


def choose_episodes(
    config: RunConfig, tokenizer: str, stop_token_ids: tuple[int, ...], is_debugged: bool
) -> AnyEpisodes:
    """Return the rank's episode runner; programs run in separate processes even on a debugged rank."""
    agents, data = config.agents, config.data
    setup = Setup(
        environment=agents.environment,
        tokenizer=tokenizer,
        options=data.apply_chat_template_kwargs,
        stop_token_ids=stop_token_ids,
        follows_template=agents.history == "template",
        max_turns=agents.max_turns,
        run_seed=config.trainer.seed,
        program=agents.program,
        tools=tuple(agents.tools),
        temperature=config.rollout.temperature,
        context_length=data.max_prompt_length + data.max_response_length,
        tool_format=agents.tool_format,
        reads_marks=data.special_tokens_in_contents,
    )
    if is_debugged and setup.program is None:
        return EpisodesInRank(setup)
    return EpisodeProcesses(setup, agents.workers, agents.episode_timeout_seconds, agents.turn_timeout_seconds)
