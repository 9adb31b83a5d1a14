# SPDX-License-Identifier: Apache-2.0
"""Single-player games of textarena and gem-llm: `textarena:FrozenLake-v0`, `gem:game:Sudoku-v0-easy`.

The first observation follows the prompt's messages. The task seeds the game, so all episodes on a prompt start alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from megatron_rl.agents.environment import Done, Environment, Observation, Reply, Task
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


# Prefix of `agents.environment` -> PyPI package, module, and environment class.
GAMES: dict[str, tuple[str, str, Callable[[str], Environment]]] = {
    "textarena": ("textarena", "textarena", TextArenaGame),
    "gem": ("gem-llm", "gem", GemGame),
}


def find_game(kind: str, name: str) -> Callable[[], Environment]:
    """Return a game's environment factory (UserError if the package or the game is missing)."""
    package, module, play = GAMES[kind]
    hint: Any = f"pip install {package}"
    try:
        import_module(module)
        hint = f"look the name up in the package {package}"
        play(name)
    except Exception as error:  # packages raise arbitrary exceptions for an unknown name
        raise UserError(
            f"{type(error).__name__}: {error}",
            source=f"agents.environment = {kind}:{name}",
            expected=f"a game of {package}",
            hint=hint,
        ) from error
    return lambda: play(name)
