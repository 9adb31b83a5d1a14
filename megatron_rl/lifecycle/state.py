# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.checkpoint.directory import find_step
from megatron_rl.checkpoint.manifest import RunContent
from megatron_rl.checkpoint.pieces import SavedRole
from megatron_rl.checkpoint.resuming import load_training_state
from megatron_rl.checkpoint.saving import save_now
from megatron_rl.parallel.collectives import world


class Stateful(Protocol):
    """A part of the run with a small state (JSON)."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""


@dataclass(frozen=True)
class TrainingState:
    """Everything that changes while a program trains.

    Attributes:
        roles: that are trained, by name.
        parts: what else has a state, by name.
        side_files: role -> files of its model, see `list_side_files`.
    """

    roles: Mapping[str, SavedRole]
    parts: Mapping[str, Stateful]
    side_files: Mapping[str, Mapping[str, Path]]

    def small_parts(self) -> dict[str, Any]:
        """The states of the parts."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_small_parts(self, states: Mapping[str, Any]) -> None:
        """Give the parts the states that there are."""
        for name, part in self.parts.items():
            if name in states:
                part.load_state_dict(states[name])

    def save(self, root: Path, step: int, recipe: str) -> Path:
        """Write `<root>/step_<N>` now; collective.

        Args:
            root: directory.
            step: that has ended.
            recipe: the resolved config as YAML.

        Raises:
            UserError: it cannot be written; on every rank.
        """
        version = self.roles["actor"].optimizer.steps
        content = RunContent(step, version, recipe, self.small_parts(), self.side_files)
        outcome = save_now(root, content, self.roles, world())
        if outcome.error is not None:
            raise outcome.error
        return outcome.directory

    def load(self, directory: Path) -> int:
        """Take up what was saved, in any layout; returns the step; collective.

        Args:
            directory: `step_<N>`, or one that has `latest`.

        Raises:
            UserError: it is not whole, or of another model; on every rank, and nothing was changed.
        """
        resumed = load_training_state(find_step(directory), self.roles, side_files=self.side_files, group=world())
        self.load_small_parts(resumed.state)
        return resumed.step
