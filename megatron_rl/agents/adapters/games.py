# SPDX-License-Identifier: Apache-2.0
"""Environments of packages: games of textarena and gem-llm, tasks of reasoning-gym, tasksets of verifiers.

The first observation follows the prompt's messages, except with verifiers, which writes the prompt itself. The task
seeds the game, so all episodes on a prompt start alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import islice
from typing import Any

from megatron_rl.agents.environment import Done, Observation, Reply, Task
from megatron_rl.extension.reasoning_gym import QUESTION, create_tasks, score_answer, split_options
from megatron_rl.types import UserError


class TextArenaGame:
    """A textarena game; its only reward comes at the end."""

    def __init__(self, name: str) -> None:
        self._game, self._shown = import_module("textarena").make(name), ""

    def reset(self, task: Task) -> Observation:
        """Return the rules and the first state."""
        self._game.reset(num_players=1, seed=task.seed)
        return self._observe()

    def step(self, reply: Reply) -> Observation | Done:
        """Play a move."""
        is_over, _ = self._game.step(reply.text)
        if not is_over:
            return self._observe()
        rewards, _ = self._game.close()
        return Done(float(rewards[0]))

    def _observe(self) -> Observation:
        """Return the new part of the game's observation, which in most games repeats the history."""
        _, shown = self._game.get_observation()
        new, self._shown = shown.removeprefix(self._shown), shown
        return Observation([{"role": "user", "content": new}], 0.0)


class GemGame:
    """A gem game, with a reward in each turn."""

    def __init__(self, name: str) -> None:
        self._game = import_module("gem").make(name)

    def reset(self, task: Task) -> Observation:
        """Return the rules and the first state."""
        shown, info = self._game.reset(seed=task.seed)
        return _say(shown, info)

    def step(self, reply: Reply) -> Observation | Done:
        """Play a move."""
        shown, reward, is_over, is_cut, info = self._game.step(reply.text)
        if is_over or is_cut:
            return Done(float(reward))
        return _say(shown, info, float(reward))


def _say(shown: str, info: Mapping[str, Any], reward: float | None = None) -> Observation:
    parts = [shown.rstrip(), info.get("suffix", "")]
    return Observation([{"role": "user", "content": "\n".join(filter(None, parts))}], reward)


class ReasoningGymTask:
    """A new task of a reasoning-gym data set, with one reply."""

    def __init__(self, name: str) -> None:
        self._name, self._tasks = name, create_tasks(name, size=1)

    def reset(self, task: Task) -> Observation:
        """Return the question."""
        self._tasks = create_tasks(self._name, size=1, seed=task.seed)
        question = QUESTION.format(question=self._tasks[0]["question"].strip())
        return Observation([{"role": "user", "content": question}])

    def step(self, reply: Reply) -> Done:
        """Score the answer."""
        return Done(score_answer(self._tasks, 0, reply.text))


class VerifiersTaskset:
    """A taskset of verifiers 0.4, as a program: its environment plays an episode against the endpoint.

    Its programs run on this machine; a taskset without a harness of its own gets the one that only chats.
    """

    def __init__(self, name: str) -> None:
        verifiers, loaders = import_module("verifiers.v1"), import_module("verifiers.v1.utils.loaders")
        taskset, options = split_options(name)
        config = loaders.resolve_env_config({"taskset": {"id": taskset, **options}})
        own = loaders.default_harness_id(taskset)
        harness = "null" if own == "bash" else own
        for role, agent in config:
            if isinstance(agent, verifiers.AgentConfig):
                chat = agent.harness or loaders.harness_config_type(harness)(id=harness)
                here = agent.model_copy(update={"runtime": verifiers.SubprocessConfig(), "harness": chat})
                config = config.model_copy(update={role: here})
        self._environment = loaders.load_environment(config)
        tasks = self._environment.taskset
        self._tasks = list(islice(tasks, None if tasks.bounded else 1_000))

    async def __call__(self, task: Task, base_url: str) -> float:
        """Play the task number `extra_info.task`, by default the seed, modulo the number of tasks.

        Raises:
            RuntimeError: the episode has failed.
        """
        verifiers = import_module("verifiers.v1")
        chosen = self._tasks[int(task.extra_info.get("task", task.seed)) % len(self._tasks)]
        client = verifiers.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
        context = verifiers.ModelContext(model="policy", client=client, sampling=verifiers.SamplingConfig())
        async with self._environment.serving():
            episode = await self._environment.run_episode(chosen, context)
        errors = [*episode.errors, *(trace.last_error for trace in episode.traces if trace.last_error)]
        if errors or len(episode.traces) != 1:
            raise RuntimeError(f"{len(episode.traces)} agents in an episode; " + "; ".join(x.message for x in errors))
        return float(episode.traces[0].reward)


# Prefix of `agents.environment` -> PyPI package, module, and class of environments; verifiers' is a program.
GAMES: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "textarena": ("textarena", "textarena", TextArenaGame),
    "gem": ("gem-llm", "gem", GemGame),
    "reasoning-gym": ("reasoning-gym", "reasoning_gym", ReasoningGymTask),
    "verifiers": ("verifiers", "verifiers.v1", VerifiersTaskset),
}


def find_game(kind: str, name: str) -> Callable[[], Any]:
    """Return a game's environment factory (UserError if the package or the game is missing)."""
    package, module, play = GAMES[kind]
    hint: Any = f"pip install {package}"
    log, handlers, level = logging.root, [*logging.root.handlers], logging.root.level
    try:
        import_module(module)
        hint = f"look the name up in the package {package}"
        play(name)
    except Exception as error:  # packages raise arbitrary exceptions for an unknown name
        raise UserError(
            f"{type(error).__name__}: {error}",
            source=f"agents.environment = {kind}:{name}",
            expected=f"an environment of {package}",
            hint=hint,
        ) from error
    finally:  # importing gem configures the root logger, which then prints megatron-core's messages
        log.handlers[:] = handlers
        log.setLevel(level)
    return lambda: play(name)
