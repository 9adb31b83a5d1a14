# SPDX-License-Identifier: Apache-2.0
"""How a run outlives its process: which checkpoint it goes on from, when it saves, and how it heeds a signal.

A checkpoint holds the end of a step. A run that is stopped before it has learned anything in a step saves the end of
the step before and does the step again; one that is stopped later finishes the step. Either way the resumed run
writes the metrics of one that was never stopped (in the same layout).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import yaml

from megatron_rl.checkpoint.directory import find_newest_valid, read_manifest
from megatron_rl.checkpoint.files import explain_os_error
from megatron_rl.checkpoint.manifest import RunContent
from megatron_rl.checkpoint.pieces import TrainedRole
from megatron_rl.checkpoint.resuming import load_training_state
from megatron_rl.checkpoint.rng import read_rng
from megatron_rl.checkpoint.saving import CheckpointSaver, SaveOutcome
from megatron_rl.config.loading import dump_yaml
from megatron_rl.config.schema import RunConfig
from megatron_rl.observability.guard import Guard
from megatron_rl.observability.metrics import METRICS_FILE, has_records
from megatron_rl.observability.run import Run
from megatron_rl.observability.watchdog import Watchdog, Watched
from megatron_rl.parallel.collectives import open_store, raise_together, share_object
from megatron_rl.stop_request import StopRequest
from megatron_rl.types import EXIT_PREEMPTED, Preempted, UserError

_MODES = ("auto", "must", "never")


class Stateful(Protocol):
    """A part of the run with a small state (JSON)."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""


@dataclass(frozen=True)
class OpenedRun:
    """A run whose directory is open and whose sinks are not.

    Attributes:
        checkpoint: whole, to go on from; None: the run begins.
        is_known: something of this run is in the directory already.
        stop: what signals ask for.
        guard: reports failures; its `close` gives the signals back, too.
    """

    run: Run
    checkpoint: Path | None
    is_known: bool
    stop: StopRequest
    guard: Guard


def open_run(config: RunConfig, recipe: Path | None, total_steps: int) -> OpenedRun:
    """Open `trainer.run_dir` (or a new name that rank 0 chooses) and choose what to go on from; collective.

    Raises:
        UserError: the directory cannot be written, holds a finished run or one that must not be resumed, or none of
            its checkpoints is whole; raised on every rank.
    """
    group, run, error = dist.group.WORLD, None, None
    name = f"{recipe.stem if recipe else 'run'}-{datetime.now():%Y%m%d-%H%M%S}"
    run_dir = Path(config.trainer.run_dir or share_object(f"checkpoints/runs/{name}", group))
    try:
        run = Run(run_dir, dump_yaml(config), total_steps, config.observability, group.rank())
    except OSError as caught:
        error = UserError(f"cannot write the run directory: {caught}", source="trainer.run_dir",
                          expected="a directory on a disk that can be written",
                          hint="free some space there, or choose another place")
    raise_together(error, group)
    is_known, is_finished = share_object((has_records(run_dir), run.is_finished), group)
    checkpoint = choose_checkpoint(config.checkpoint.resume, run, is_known, group)
    if is_finished and (checkpoint is None or checkpoint.parent != run.checkpoints):
        raise _refuse(run_dir)
    if checkpoint is not None:
        _check_steps(checkpoint, total_steps, is_finished, group)
    stop = StopRequest(run.log)
    return OpenedRun(run, checkpoint, is_known, stop, _start_guard(run, stop, config.trainer.collective_timeout, group))


def _start_guard(run: Run, stop: StopRequest, limit: float, group: dist.ProcessGroup) -> Guard:
    """What watches this rank and reports its failures, until it is closed; collective."""
    watched, watchdog = Watched(
        group.rank(), group.size(), run.timers, limit, run.log_file, run.log, lambda: stop.is_here,
        any_place=torch.cuda.is_available()), None
    if group.size() > 1:
        watchdog = Watchdog(watched, open_store("watchdog", group))
        run.positions = watchdog.positions
    return Guard(watched, watchdog, release=stop.close)


def choose_checkpoint(resume: str, run: Run, is_known: bool, group: dist.ProcessGroup) -> Path | None:
    """The checkpoint that `checkpoint.resume` means; collective.

    The run's own newest whole one comes before a path elsewhere: a restarted job must not begin again.

    Args:
        resume: auto, must, never or a path.
        run: says which checkpoints were skipped.
        is_known: the run directory holds metrics.
        group: all ranks.

    Raises:
        UserError: there is none where one must be; on every rank.
    """
    if resume == "never":
        if is_known:
            raise _refuse(run.dir)
        return None
    found = find_newest_valid(run.checkpoints, group)
    for line in found.skipped:
        run.log.warning("checkpoint skipped, it is not whole: %s", line)
    if found.directory is None and found.skipped:
        raise UserError(
            f"none of the checkpoints is whole; the newest: {found.skipped[0]}", source=str(run.checkpoints),
            expected="one whole checkpoint", hint="restore one, or choose another trainer.run_dir to begin anew")
    if resume in _MODES:
        if found.directory is None and resume == "must":
            raise UserError("there is no checkpoint", source=f"checkpoint.resume=must, {run.checkpoints}",
                            expected="a run that was saved", hint="set checkpoint.resume=auto to begin one")
        return found.directory
    path, root = _step_directory(Path(resume)), run.checkpoints.resolve()
    if found.directory is None:
        return path
    if path.is_relative_to(root) and path != found.directory.resolve():
        raise UserError(
            f"{path.name} is not the newest checkpoint of this run, {found.directory.name} is",
            source="checkpoint.resume", expected="the newest checkpoint, or one of another run",
            hint="remove the newer ones to go back in this run, or choose another trainer.run_dir")
    return found.directory


def _step_directory(path: Path) -> Path:
    """The step that a path means: itself, or the newest of a run."""
    for candidate in (path / "latest", path / "checkpoints" / "latest"):
        if candidate.exists():
            return candidate.resolve()
    return path.resolve()


def _check_steps(checkpoint: Path, total_steps: int, is_finished: bool, group: dist.ProcessGroup) -> None:
    """Refuse to go on where no step is left (one that was cut off after its last step has its end to write)."""
    error = None
    try:
        step = read_manifest(checkpoint).get("step", 0)
        if step > total_steps or (step == total_steps and is_finished):
            error = UserError(
                f"the run has taken {step} steps, {total_steps} are asked for", source=str(checkpoint),
                expected="steps that are left to take",
                hint="raise trainer.total_steps (or total_epochs) to go on, or choose another trainer.run_dir")
    except UserError as caught:
        error = caught
    raise_together(error, group)


def _refuse(run_dir: Path) -> UserError:
    return UserError(
        f"{run_dir / METRICS_FILE} already holds the metrics of a run", source="trainer.run_dir",
        expected="a new or empty run directory", hint="choose another trainer.run_dir, or remove this one")


class Checkpoints:
    """Saves and restores one run, and stops it when a signal asks for it; all methods are collective.

    Args:
        config: the resolved config.
        opened: from `open_run`.
        roles: that are trained, by name.
        parts: what else has a state, by name.
        side_files: role -> files of its model, see `list_side_files`.
        export: writes the policy in HF format into a new directory.
        total_steps: of the run.
    """

    def __init__(
        self, config: RunConfig, opened: OpenedRun, roles: Mapping[str, TrainedRole], parts: Mapping[str, Stateful], *,
        side_files: Mapping[str, Mapping[str, Path]], export: Callable[[Path], None], total_steps: int,
    ) -> None:
        self._config, self._run, self._opened, self._total_steps = config, opened.run, opened, total_steps
        self._roles, self._parts, self._side_files, self._export = roles, parts, side_files, export
        self._group = dist.group.WORLD
        self._saver = CheckpointSaver(
            opened.run.checkpoints, self._group, async_save=config.checkpoint.async_save,
            keep_last=config.checkpoint.keep_last, keep_best=config.checkpoint.keep_best, report=self._report)
        self._last: SaveOutcome | None = None
        self._marked: tuple[RunContent, dict[str, torch.Tensor]] | None = None
        self._recipe, self._restored_record = dump_yaml(config), {}

    def start(self) -> int | None:
        """Restore the checkpoint where there is one, and open the sinks; the step that it ends, None for a new run.

        Raises:
            UserError: the checkpoint does not fit this run, or the run is finished; nothing was changed then.
        """
        directory, step = self._opened.checkpoint, None
        if directory is not None:
            step = self._restore(directory)
        elif self._opened.is_known:
            self._run.log.warning("the run ended before its first checkpoint: it begins anew")
        error = None
        try:
            self._run.start(step if step is not None else -1 if self._opened.is_known else None)
        except (UserError, OSError) as caught:
            error = caught if isinstance(caught, UserError) else explain_os_error(caught, self._run.dir)
        raise_together(error, self._group)
        if directory is not None and directory.parent == self._run.checkpoints:
            self._complete_records(step)
        self.mark(step or 0)
        return step

    def _restore(self, directory: Path) -> int:
        is_own = directory.parent == self._run.checkpoints  # looked at by `open_run`
        resumed = load_training_state(
            directory, self._roles, side_files=self._side_files, group=self._group, is_verified=is_own)
        for name, part in self._parts.items():
            if name in resumed.state:
                part.load_state_dict(resumed.state[name])
        if resumed.state.get("best_value") is not None:
            self._run.best_value = resumed.state["best_value"]
        self._restored_record = resumed.state.get("record", {})
        if is_own:
            self._last = SaveOutcome(resumed.step, directory, 0.0, 0.0)
        say = self._run.log.info
        say("resumed: %s, step %d, %d optimizer steps", directory, resumed.step, resumed.policy_version)
        if not resumed.same_layout:
            say("  another layout than before: random numbers begin anew, and results may differ by rounding")
        for line in describe_changes(resumed.recipe, self._recipe):
            say("  changed since: %s", line)
        return resumed.step

    def _complete_records(self, step: int) -> None:
        """Write the record of the restored step if the process ended between its checkpoint and its record."""
        if self._restored_record and self._run.is_writer and self._run.last_recorded_step() < step:
            self._run.timers.pop()
            self._run.count(self._restored_record)
            self._run.record(step)

    def mark(self, step: int) -> None:
        """Remember what is small of the end of a step; weights and optimizer states change only in updates."""
        best = self._run.best_value
        state = {name: part.state_dict() for name, part in self._parts.items()} | {
            "best_value": None if best == float("-inf") else best, "record": self._run.counted()}
        version = self._roles["actor"].optimizer_steps
        self._marked = RunContent(step, version, self._recipe, state, self._side_files), read_rng()

    def end_step(self, step: int, is_best: bool = False) -> None:
        """Save if it is due."""
        self.mark(step)
        config = self._config.trainer
        is_due = config.save_freq and step % config.save_freq == 0
        if is_due or is_best or (config.save_final and step == self._total_steps):
            with self._run.timers.phase("save", swallow=True):
                self._save(is_best, self._export if self._config.checkpoint.save_huggingface else None)

    def _save(self, is_best: bool = False, export: Callable[[Path], None] | None = None) -> None:
        content, rng = self._marked
        self._saver.save(
            content, self._roles, with_optimizer=self._config.checkpoint.save_optimizer, is_best=is_best,
            export=export, rng=rng)

    def save_into(self, root: Path) -> UserError | None:
        """Write the end of the last step to `<root>/step_<N>`, at once, whatever the run's own checkpoints are.

        Returns:
            Why it failed, on every rank.
        """
        content, rng = self._marked
        outcomes: list[SaveOutcome] = []
        CheckpointSaver(
            root, self._group, async_save=False, keep_last=None, keep_best=False, report=outcomes.append,
        ).save(content, self._roles, rng=rng)
        return outcomes[0].error

    def safe_point(self) -> None:
        """Here the run may end; nothing has been learned since the last mark.

        Raises:
            Preempted: a signal asked for it, and the end of the last step is on the disk.
            UserError: it could not be saved.
        """
        self._saver.poll()
        received = self._opened.stop.agreed(self._group)
        if received is None:
            return
        step = self._marked[0].step
        if step == self._total_steps:
            return  # nothing is left to do but to finish
        self._run.log.info("%s: the run stops after step %d", received, step)
        self._saver.wait()
        if self._last is None or self._last.step != step or self._last.error:
            with self._run.timers.phase("save", swallow=True):
                self._save()
                self._saver.wait()
        if self._last.error:
            raise self._last.error
        self._run.note_stop({"signal": received, "step": step, "exit_code": EXIT_PREEMPTED})
        raise Preempted(f"{received} after step {step}; start the same command again to go on from "
                        f"{self._last.directory}")

    def commit(self) -> None:
        """Finish a save that is being written."""
        self._saver.wait()

    def finish(self) -> None:
        """Wait for the last save.

        Raises:
            UserError: it failed.
        """
        self.commit()
        if self._last is not None and self._last.error:
            raise self._last.error

    def _report(self, outcome: SaveOutcome) -> None:
        self._last, say = outcome, self._run.log
        if outcome.error:
            say.error("checkpoint of step %d failed, older ones stay: %s", outcome.step, outcome.error)
        else:
            say.info("checkpoint: %s, %s bytes in %.1f s (%.1f s of waiting)%s", outcome.directory,
                     f"{outcome.num_bytes:,}", outcome.seconds, outcome.blocked_seconds,
                     "".join(f"; step_{step} deleted" for step in outcome.deleted_steps))

    def close(self) -> None:
        """Give back signals and watchdog (also after an error; not collective)."""
        self._opened.guard.close()


def describe_changes(before: str, now: str) -> list[str]:
    """Settings that differ between two resolved configs in YAML."""
    old, new = (_flatten(yaml.safe_load(text) or {}) for text in (before, now))
    return [f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
            for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
