# SPDX-License-Identifier: Apache-2.0
"""Two environments of the package openenv behind its server: `python openenv_server.py guess|desk`; prints the port.

For an interpreter that has the package; tests/agents/test_openenv.py plays them.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """A text."""

    text: str


class Hint(Observation):
    """A guess."""

    hint: str = ""


class GuessEnvironment(Environment):
    """Rewards a guess of its number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, plus: int = 0, **more: Any) -> Hint:
        """Set the number to the seed plus the row's offset."""
        self.number = (seed or 0) + plus
        return Hint(hint=f"Say {self.number}.")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Hint:
        """Half a point for trying."""
        if action.text == "crash":
            raise RuntimeError("lost the thread")
        is_right = action.text == str(self.number)
        return Hint(hint="" if is_right else "No.", reward=1.0 if is_right else 0.5, done=is_right)

    @property
    def state(self) -> State:
        """Nothing."""
        return State()


class DeskEnvironment(MCPEnvironment):
    """A tool that counts visitors."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        desk, self.count = FastMCP("desk"), 0

        @desk.tool
        def visit(name: str) -> str:
            """Visit the desk."""
            self.count += 1
            return f"{name} is visitor {self.count}"

        super().__init__(desk)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Observation:
        """Nobody has been here."""
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        """Nothing."""
        return State()


def main(kind: str) -> None:
    """Serve until killed."""
    parts = {"guess": (GuessEnvironment, Guess, Hint), "desk": (DeskEnvironment, CallToolAction, CallToolObservation)}
    app = create_fastapi_app(*parts[kind], max_concurrent_envs=1)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listening])


if __name__ == "__main__":
    main(sys.argv[1])
