# SPDX-License-Identifier: Apache-2.0
"""What the clock decides in a run: the decode steps that each engine makes in each phase, written and replayed.

    <run_dir>/schedule/engine_<i>.jsonl   {"step": 3, "phase": "rollout", "decode_steps": 41, "engines": 2}

The first rank of an engine appends a line at the end of a phase: the decode steps behind the first one, which every
phase makes. "rollout 1", "rollout 2" are further rounds of dynamic sampling; "beside training" is that of engines on
ranks of their own, behind the rollout of the step. A step that is done again, after a kill, has its lines again: the
last one of a phase counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_rl.rollout.phase import Goal, PhaseEnd
from megatron_rl.types import UserError

DecodeSteps = Mapping[tuple[int, str], int]  # by step and phase


class ScheduleTrace:
    """Decode steps of phases; the same calls on every rank.

    Args:
        num_engines: of the run.
        engine: whose first rank this is; None: of none.
        directory: that is written, `<run_dir>/schedule`; None: nothing is.
        replayed: from `read_trace`; None: phases end by themselves.
    """

    def __init__(
        self,
        num_engines: int = 0,
        engine: int | None = None,
        directory: Path | None = None,
        replayed: Sequence[DecodeSteps] | None = None,
    ) -> None:
        self._num_engines, self._engine, self._directory, self._replayed = num_engines, engine, directory, replayed

    def find_end(self, step: int, phase: str) -> PhaseEnd | None:
        """The end of a phase as it was; None where it is not replayed.

        Raises:
            UserError: the trace does not have it; on every rank.
        """
        if self._replayed is None:
            return None
        for index, found in enumerate(self._replayed):
            if (step, phase) not in found:
                raise UserError(
                    f"the trace of engine {index} does not have step {step} ({phase})",
                    source="schedule.replay",
                    expected="a run that has taken this step",
                    hint="set trainer.total_steps to the steps that it has taken, or leave schedule.replay out",
                )
        return _AfterSteps(0 if self._engine is None else self._replayed[self._engine][step, phase])

    def write(self, step: int, phase: str, decode_steps: int) -> None:
        """Add the end of a phase."""
        if self._directory is None or self._engine is None:
            return
        line = {"step": step, "phase": phase, "decode_steps": decode_steps, "engines": self._num_engines}
        self._directory.mkdir(parents=True, exist_ok=True)
        with _file_of(self._directory, self._engine).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class _AfterSteps:
    """The end of a phase after so many decode steps of this engine."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def begin(self, goal: Goal) -> None:
        """Nobody is asked."""

    def is_over(self, left: np.ndarray) -> bool:
        """Whether they are made."""
        self._left -= 1
        return self._left < 0

    def give_up(self) -> None:
        """Nobody waits for an engine."""


def read_trace(run_dir: Path, num_engines: int) -> list[DecodeSteps]:
    """What a run has written, per engine.

    Raises:
        UserError: there is no trace, or it is of another number of engines.
    """
    found: list[DecodeSteps] = []
    for index in range(num_engines):
        path, steps, engines = _file_of(run_dir / "schedule", index), {}, num_engines
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                steps[entry["step"], entry["phase"]], engines = entry["decode_steps"], entry["engines"]
        except (OSError, ValueError, KeyError) as error:
            raise _refuse(run_dir, f"{path} does not read: {error!r}") from error
        if engines != num_engines:
            raise _refuse(run_dir, f"it had {engines} engines, this one has {num_engines}")
        found.append(steps)
    return found


def _file_of(directory: Path, engine: int) -> Path:
    return directory / f"engine_{engine}.jsonl"


def _refuse(run_dir: Path, found: str) -> UserError:
    return UserError(
        f"{run_dir} has no trace to be replayed: {found}",
        source="schedule.replay",
        expected="the directory of a run with schedule.max_staleness > 0, updates=in_flight, no steps_per_update, and "
        "the same engines",
        hint="check the path, the number of ranks and rollout.tensor_model_parallel_size",
    )
