# SPDX-License-Identifier: Apache-2.0
"""Record and replay of a schedule: the decode steps of each engine in each phase, if the clock decides them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.rollout.serving import AfterSteps, PhaseEnd
from megatron_rl.types import UserError

DecodeSteps = Mapping[tuple[int, str], int]  # by step and phase


class ScheduleTrace:
    """Recorder and replayer of timing-dependent decisions, the decode steps of each engine in each phase.

        <run_dir>/schedule/engine_<i>.jsonl   {"step": 3, "phase": "rollout", "decode_steps": 41, "engines": 2}

    `decode_steps` excludes the first step, which every phase runs. "rollout 1", "rollout 2" are further rounds of
    dynamic sampling; "beside training" is generation on dedicated ranks. A step repeated after a restart appends its
    lines again; the last line counts. Every rank makes the same calls.

    Args:
        engine: engine whose first rank this is, else `None`.
        directory: nothing is written if `None`.
        replayed: result of `read_trace`; no replay if `None`.
    """

    def __init__(
        self, num_engines: int, engine: int | None, directory: Path | None, replayed: Sequence[DecodeSteps] | None
    ) -> None:
        self._num_engines, self._engine, self._directory, self._replayed = num_engines, engine, directory, replayed

    def find_end(self, step: int, phase: str) -> PhaseEnd | None:
        """Return the recorded end of a phase, `None` without replay (UserError on every rank if the trace lacks it)."""
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
        return AfterSteps(0 if self._engine is None else self._replayed[self._engine][step, phase])

    def write(self, step: int, phase: str, decode_steps: int) -> None:
        """Append a phase to the trace, on an engine's first rank."""
        if self._directory is None or self._engine is None:
            return
        line = {"step": step, "phase": phase, "decode_steps": decode_steps, "engines": self._num_engines}
        self._directory.mkdir(parents=True, exist_ok=True)
        with _file_of(self._directory, self._engine).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_trace(run_dir: Path, num_engines: int) -> list[DecodeSteps]:
    """Read the trace of a run, per engine (UserError if there is no valid one, or it has other engines)."""
    found: list[DecodeSteps] = []
    for index in range(num_engines):
        path, steps, engines = _file_of(run_dir / "schedule", index), {}, num_engines
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                steps[entry["step"], entry["phase"]], engines = entry["decode_steps"], entry["engines"]
        except (OSError, ValueError, KeyError) as error:
            raise _refuse(run_dir, f"{path} cannot be read: {error!r}") from error
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
