# SPDX-License-Identifier: Apache-2.0
"""The window of prompts that may be ahead of their step, and the end of a phase of generation on all engines;
record and replay of these ends, if the clock decides them.

A phase ends on all engines at once. Finished engines keep generating for later steps. With `StepCount` all engines end
at the same multiple of decode steps, reproducibly; with `ByStore` as soon as possible.

With max_staleness k and B prompts per step, no prompt is trained on more than k steps after the one in which it may
begin. For a step that has taken c prompts so far and needs n more, let s = c + n: B at first, B more per step, and more
if dynamic sampling drops prompts. Prompt i may begin once i < s + k B - p, and must be taken once i < s - p, at most k
steps later.

`schedule.order: stream` has p = 0: a step takes the next prompts. `whole` has p = k B / 2: a step takes the prompts
that must be taken, then complete groups. As k B - p prompts are ahead at the end of a step, the mean staleness is k - p
/ B: half the bound with `whole`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megatron_rl.parallel.collectives import align_group_names, make_group, open_store, world
from megatron_rl.types import UserError

DecodeSteps = Mapping[tuple[int, str], int]  # by step and phase

_POLL_SECONDS = 0.02
_LONGEST_POLL_SECONDS = 0.1
_FAILURE_SECONDS = 1.0  # poll of an unfinished engine, for failures only


def find_window(open_: Sequence[int], begun: int, wanted: int, ahead: int, passed: int) -> tuple[int, range]:
    """Find the open prompts that must be taken next, and the new prompts that begin.

    Args:
        open_: ordered positions of begun, untaken prompts.
        begun: number of prompts that have begun.
        wanted: prompts that the step needs.
        ahead: prompts that may begin ahead of their step.
        passed: prompts that may be passed over.

    Returns:
        How many of the open and then the new prompts must be taken; positions of the new ones.
    """
    end = begun - len(open_) + wanted - passed
    new = range(begun, max(begun, end + ahead))
    return min(wanted, sum(position < end for position in [*open_, *new])), new


@dataclass(frozen=True)
class PhaseTarget:
    """Groups that a phase waits for."""

    needed: int  # number of leading groups that must be complete
    wanted: int  # total number of groups that must be complete
    left: np.ndarray  # [groups] this engine's unfinished samples
    holders: np.ndarray  # [groups] number of engines with unfinished samples

    def is_reached(self, left: np.ndarray) -> bool:
        """Return whether the target is reached; `left`: [groups] unfinished samples of all engines."""
        return not left[: self.needed].any() and int(np.count_nonzero(left == 0)) >= self.wanted


class PhaseEnd:
    """End condition of a phase, polled by each engine's first rank before each step."""

    def begin(self, target: PhaseTarget) -> None:
        """Begin a phase; every rank makes the same calls."""

    def is_over(self, left: np.ndarray) -> bool:
        """Return whether the phase is over; `left`: [groups] this engine's unfinished samples."""
        raise NotImplementedError

    def give_up(self) -> None:
        """End the phase for all engines after a failure; do nothing if no engine waits for another."""


class ByStore(PhaseEnd):
    """Phase end by wall clock: engines count finished work in the job's key-value store.

    A phase ends for all engines as soon as every engine has finished its samples of the first `needed` groups, and
    enough of the other, optional groups are finished by all of their `holders` for `wanted` complete groups in total.
    """

    def __init__(self, store: Store, num_engines: int) -> None:
        self._store, self._num_engines = store, num_engines
        self._phase = 0
        self._mine: set[str] = set()  # keys of the phase that this engine created

    def begin(self, target: PhaseTarget) -> None:
        """Begin a phase."""
        for key in self._mine:
            self._store.delete_key(key)
        self._mine.clear()
        self._phase += 1
        self._goal, self._left = target, target.left
        self._missing = target.wanted - target.needed - int(np.count_nonzero(target.holders[target.needed :] == 0))
        self._is_signaled = self._is_over = False
        self._looked = 0.0

    def is_over(self, left: np.ndarray) -> bool:
        """Publish finished work and return whether the phase is over."""
        has_news = False
        if not self._is_signaled and not left[: self._goal.needed].any():
            self._is_signaled = has_news = True
            self._count("engines")
        if self._missing > 0:
            for group in np.flatnonzero((left == 0) & (self._left > 0)).tolist():
                if group >= self._goal.needed and self._count(f"group {group}") == self._goal.holders[group]:
                    has_news = True
                    self._count("groups")
            self._left = left.copy()
        if (
            has_news
            and self._count("engines", 0) >= self._num_engines
            and (self._missing <= 0 or self._count("groups", 0) >= self._missing)
        ):
            self.give_up()
        period = _POLL_SECONDS if self._is_signaled else _FAILURE_SECONDS
        if not self._is_over and time.monotonic() - self._looked >= period:
            self._is_over = self._count("over", 0) > 0
            self._looked = time.monotonic()
        return self._is_over

    def give_up(self) -> None:
        """End the phase for all engines."""
        self._count("over")
        self._is_over = True

    def _count(self, name: str, count: int = 1) -> int:
        key = f"phase {self._phase} {name}"
        found = self._store.add(key, count)
        if found == count:
            self._mine.add(key)
        return found


class StepCount(PhaseEnd):
    """Phase end by decode steps: all engines synchronize after every `every` steps."""

    def __init__(self, every: int, group: dist.ProcessGroup | None) -> None:
        self._every, self._group = every, group

    def begin(self, target: PhaseTarget) -> None:
        """Begin a phase."""
        self._steps, self._goal = 0, target

    def is_over(self, left: np.ndarray) -> bool:
        """Count a decode step; return whether the phase ends; collective over engines in every `every`-th step."""
        self._steps += 1
        return self._steps % self._every == 0 and self._meet(left, 0)

    def give_up(self) -> None:
        """End the phase at the next synchronization."""
        self._meet(np.zeros_like(self._goal.left), 1)

    def _meet(self, left: np.ndarray, failures: int) -> bool:
        found = torch.tensor([*left, failures])
        if self._group is not None:
            dist.all_reduce(found, group=self._group)
        return bool(found[-1]) or self._goal.is_reached(found[:-1].numpy())


class TrainingEnd(PhaseEnd):
    """Signal that the training phase has ended: one training rank sets it, dedicated engines poll it."""

    def __init__(self, store: Store) -> None:
        self._store, self._number = store, 0

    def begin(self, target: PhaseTarget | None = None) -> None:
        """Begin a training phase."""
        self._number += 1
        self._begun, self._next_look = time.monotonic(), 0.0

    def signal(self) -> None:
        """Signal the end of training."""
        self._store.add(f"trained {self._number}", 1)

    def is_over(self, left: np.ndarray) -> bool:
        """Return whether training has ended."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        # A poll takes half a millisecond; the longer the phase, the less a late end matters.
        self._next_look = now + min(max(_POLL_SECONDS, (now - self._begun) / 50), _LONGEST_POLL_SECONDS)
        return self._store.add(f"trained {self._number}", 0) > 0


class AfterSteps(PhaseEnd):
    """End of a phase after a fixed number of decode steps per engine, reproducible."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def is_over(self, left: np.ndarray) -> bool:
        """Count a decode step; return whether it exceeds the number."""
        self._left -= 1
        return self._left < 0


def open_phase_end(every: int | None, engines: Sequence[Sequence[int]], timeout: timedelta | None) -> PhaseEnd:
    """Create the end condition of all phases: `StepCount`, `ByStore` if `every` is `None`; collective over the job."""
    if every is None:
        return ByStore(open_store("phases", world()), len(engines))
    if len(engines) == 1:
        return StepCount(every, None)
    align_group_names()
    return StepCount(every, make_group([ranks[0] for ranks in engines], timeout))


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
