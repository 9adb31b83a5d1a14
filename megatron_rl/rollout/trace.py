# SPDX-License-Identifier: Apache-2.0
"""Record and replay of timing-dependent decisions: the decode steps of each engine in each phase.

    <run_dir>/schedule/engine_<i>.jsonl   {"step": 3, "phase": "rollout", "decode_steps": 41, "engines": 2}

`decode_steps` excludes the first step, which every phase runs. "rollout 1", "rollout 2" are further rounds of dynamic
sampling; "beside training" is generation on dedicated ranks. A step repeated after a restart appends its lines again;
the last line counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_rl.rollout.phase import PhaseEnd, PhaseTarget
from megatron_rl.types import UserError

DecodeSteps = Mapping[tuple[int, str], int]  # by step and phase


class ScheduleTrace:
    """Recorder and replayer of decode steps; every rank makes the same calls.

    Args:
        engine: engine whose first rank this is, else `None`.
        directory: nothing is written if `None`.
        replayed: result of `read_trace`; no replay if `None`.
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
        """Return the recorded end of a phase, or `None` without replay.

        Raises:
            UserError: the trace does not contain the phase; on every rank.
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
        """Append the end of a phase."""
        if self._directory is None or self._engine is None:
            return
        line = {"step": step, "phase": phase, "decode_steps": decode_steps, "engines": self._num_engines}
        self._directory.mkdir(parents=True, exist_ok=True)
        with _file_of(self._directory, self._engine).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class _AfterSteps:
    """End of a phase after a number of decode steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def begin(self, target: PhaseTarget) -> None:
        """Do nothing."""

    def is_over(self, left: np.ndarray) -> bool:
        """Count a step; return whether all steps are done."""
        self._left -= 1
        return self._left < 0

    def give_up(self) -> None:
        """Do nothing: no engine waits for another."""


def read_trace(run_dir: Path, num_engines: int) -> list[DecodeSteps]:
    """Read the trace of a run, per engine.

    Raises:
        UserError: no valid trace, or another number of engines.
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
