# SPDX-License-Identifier: Apache-2.0
"""Save a run, resume it from a checkpoint, and stop it on a signal; all that a checkpoint of a program contains.

A checkpoint holds the end of a step. A run stopped before the step's first update saves the end of the previous step,
and later repeats the step; otherwise it finishes the step. Either way the resumed run writes the metrics of an
uninterrupted one (in the same layout).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_rl.checkpoint.directory import RunContent
from megatron_rl.checkpoint.files import explain_os_error, find_model_files, list_side_files
from megatron_rl.checkpoint.huggingface import ShardedModel, save_huggingface
from megatron_rl.checkpoint.pieces import SavedRole
from megatron_rl.checkpoint.saving import CheckpointSaver, RankState, SaveOutcome, save_now
from megatron_rl.config.fields import dump_yaml
from megatron_rl.config.schema import RunConfig
from megatron_rl.parallel.collectives import failing_together, raise_together, read_rng, world
from megatron_rl.rollout.collector import RolloutStream
from megatron_rl.run.opening import OpenedRun, describe_changes
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.setup import LaidOutModel
from megatron_rl.transfer.planner import group_shards
from megatron_rl.types import EXIT_PREEMPTED, Preempted, UserError
from megatron_rl.weights.shard_box import ShardBox

if TYPE_CHECKING:
    from megatron_rl.checkpoint.resuming import ResumedRun


def actor_export(config: RunConfig, model: LaidOutModel, mtp: LaidOutModel | None = None) -> Callable[[Path], None]:
    """Return a collective function that writes the actor in HF format, or its adapters in PEFT format.

    Args:
        mtp: the trained multi-token prediction layer; without it, that of `model.path` is copied.
    """
    base = Path(config.model.path).absolute()  # a user's function may change the working directory
    model_files = find_model_files(base)

    def write(model: PackedModel, directory: Path) -> None:
        part: Any = model.trained
        params: Any = part.params  # plain tensors: NF4 weights are not trained
        shards = group_shards(part.placements, part.shard_key, model.layout.ranks)
        trained = ShardedModel(model.shape, shards, params, model.groups.world, model.dtype)
        if model.adapters is not None:
            from megatron_rl.checkpoint.peft import save_adapters

            save_adapters(directory, trained, part.shape, config.actor.lora, base)
            return
        if mtp is not None:
            trained = _add_mtp(trained, model, mtp)
        save_huggingface(directory, trained, side_files_from=model_files, bucket_bytes=config.hybrid.bucket_bytes)

    def export(directory: Path) -> None:
        error = None
        if isinstance(model, PackedModel):
            try:
                write(model, directory)
            except Exception as caught:
                if not hasattr(caught, "raised_on"):
                    raise  # on this rank alone: the others wait in a collective
                error = caught
        raise_together(error, world())

    return export


def _add_mtp(model: ShardedModel, part: LaidOutModel, mtp: LaidOutModel) -> ShardedModel:
    def place(rank: int) -> list[ShardBox]:
        found = mtp.placements(rank) if rank in mtp.layout.ranks else ()
        return [*part.placements(rank), *(replace(p, param=f"mtp.{p.param}") for p in found)]

    def find_key(rank: int) -> Hashable:
        return part.shard_key(rank), mtp.shard_key(rank) if rank in mtp.layout.ranks else None

    params: Any = {f"mtp.{name}": param for name, param in mtp.params.items()}
    shards = group_shards(place, find_key, part.layout.ranks)
    return replace(model, shards=shards, params={**model.params, **params}, mtp=mtp.shape)


def side_files(config: RunConfig, path: str) -> dict[str, Path]:
    """Return name -> path of a role's files besides weights (config, tokenizer)."""
    tokenizer = config.model.tokenizer
    return list_side_files(Path(path), Path(tokenizer) if tokenizer else None)


_ROLLOUTS = "rollouts"


@dataclass(frozen=True)
class TrainingState:
    """Everything that changes while a program trains."""

    roles: Mapping[str, SavedRole]  # trained roles of this rank
    parts: Mapping[str, Any]  # other objects by name, whose `state_dict` is JSON for their `load_state_dict`
    side_files: Mapping[str, Mapping[str, Path]]  # files besides weights, by role
    rollouts: RolloutStream | None = None  # unfinished responses; `None` if all end in their step

    def content(self, step: int, recipe: str, **more: Any) -> RunContent:
        """Describe the end of a step for a checkpoint, with the state of each part and, by name, of `more`."""
        version = self.roles["actor"].optimizer.steps if "actor" in self.roles else -1  # -1: the actor is elsewhere
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return RunContent(step, version, recipe, states | more, self.side_files)

    def rank_state(self) -> RankState:
        """Return the state that only this rank has: RNG streams, and unfinished responses of its engine."""
        held = self.rollouts.rank_state() if self.rollouts is not None else {}
        return {"rng": read_rng()} | ({_ROLLOUTS: held} if held else {})

    def restore(self, resumed: ResumedRun, group: dist.ProcessGroup) -> None:
        """Load the states of all parts (UserError on every rank if one does not fit or cannot be read); collective."""
        with failing_together(group):
            for name, part in self.parts.items():
                if name in resumed.state:
                    part.load_state_dict(resumed.state[name])
            if self.rollouts is not None:
                from megatron_rl.checkpoint.resuming import read_rank_states

                self.rollouts.load_rank_states(read_rank_states(resumed.directory, _ROLLOUTS))


MAX_FAILED_SAVES = 3  # in a row


class Checkpoints:
    """Checkpoints of one run, and its reaction to stop signals; `export` writes the policy in HF format. Collective."""

    def __init__(
        self,
        config: RunConfig,
        opened: OpenedRun,
        state: TrainingState,
        *,
        export: Callable[[Path], None],
        total_steps: int,
    ) -> None:
        self._config, self._run, self._opened, self._total_steps = config, opened.run, opened, total_steps
        self._state, self._export = state, export
        self._group = world()
        self._saver = CheckpointSaver(
            opened.run.checkpoints,
            self._group,
            async_save=config.checkpoint.async_save,
            keep_last=config.checkpoint.keep_last,
            keep_best=True,
            report=self._report,
        )
        self._last: SaveOutcome | None = None
        self._recipe, self._restored_record = dump_yaml(config), {}
        self._saved_at, self._failures_in_a_row = time.monotonic(), 0

    def start(self) -> int | None:
        """Restore a checkpoint (UserError if unfit) and open the logs; return its step, `None` for a new run."""
        directory, step = self._opened.checkpoint, None
        if directory is not None:
            step = self._restore(directory)
        elif self._opened.is_known:
            self._run.log.warning("the run ended before its first checkpoint: it starts from its beginning")
        if not self._config.trainer.save_freq and self._config.checkpoint.save_every_minutes is None:
            self._run.log.warning(
                "no checkpoint is written before the end (trainer.save_freq, "
                "checkpoint.save_every_minutes): a crash loses the whole run"
            )
        last = step if step is not None else -1 if self._opened.is_known else None
        with failing_together(self._group, lambda error: explain_os_error(error, self._run.dir)):
            self._run.start(last, self._opened.guard.positions)
        if step is not None and self._restored_record and self._run.is_writer and self._run.last_recorded_step() < step:
            self._run.timers.pop()  # the process ended between this checkpoint and the record of its step
            self._run.count(self._restored_record)
            self._run.record(step)
        self.mark(step or 0)
        self._saved_at = time.monotonic()
        return step

    def _restore(self, directory: Path) -> int:
        from megatron_rl.checkpoint.resuming import load_training_state

        is_own = directory.parent == self._run.checkpoints  # verified by `open_run`
        resumed = load_training_state(
            directory, self._state.roles, side_files=self._state.side_files, group=self._group, is_verified=is_own
        )
        self._state.restore(resumed, self._group)
        self._run.resume(resumed.state.get("best_value"), resumed.state.get("failed_saves", []) if is_own else [])
        if is_own:
            self._restored_record = resumed.state.get("record", {})
            self._last = SaveOutcome(resumed.step, directory, 0.0, 0.0)
        say = self._run.log.info
        say("resumed: %s, step %d, %d optimizer steps", directory, resumed.step, resumed.policy_version)
        if not resumed.same_layout:
            say("  another layout than before: random numbers begin again, and results may differ by rounding")
        for line in describe_changes(resumed.recipe, self._recipe):
            say("  changed since: %s", line)
        return resumed.step

    def mark(self, step: int) -> None:
        """Keep the state at the end of a step for a later save, except weights and optimizer states."""
        best = self._run.best_value
        content = self._state.content(
            step,
            self._recipe,
            best_value=None if best == float("-inf") else best,
            record=self._run.counted(),
            dependencies=self._opened.dependencies,
            failed_saves=list(self._run.failed_saves),
        )
        self._marked = content, self._state.rank_state()

    def end_step(self, step: int, is_best: bool = False) -> None:
        """Save if a checkpoint is due (UserError if too many saves have failed)."""
        self.mark(step)
        freq, is_last = self._config.trainer.save_freq, step == self._total_steps
        stays = is_best or (freq is not None and (is_last or (freq > 0 and step % freq == 0)))
        minutes, is_overdue = self._config.checkpoint.save_every_minutes, torch.tensor(0)
        if not stays and not is_last and minutes is not None:  # on any rank
            is_overdue.fill_(time.monotonic() - self._saved_at >= 60 * minutes)
            dist.all_reduce(is_overdue, dist.ReduceOp.MAX, group=self._group)
        if stays or is_overdue:
            with self._run.timers.phase("save", swallow=True):
                exports = stays and "huggingface" in self._config.checkpoint.contents
                self._save(is_best, self._export if exports else None, is_passing=not stays)
        self._check_failures()

    def _save(
        self, is_best: bool = False, export: Callable[[Path], None] | None = None, is_passing: bool = False
    ) -> None:
        self._run.settle()  # no record of a step may be written after its checkpoint
        content, rank_state = self._marked
        content, self._saved_at = replace(content, is_passing=is_passing), time.monotonic()
        self._saver.save(
            content,
            self._state.roles,
            with_optimizer="optimizer" in self._config.checkpoint.contents,
            is_best=is_best,
            export=export,
            rank_state=rank_state,
        )

    def save_into(self, root: Path) -> UserError | None:
        """Write the end of the last step to `<root>/step_<N>` at once; return the error, if any, on every rank."""
        content, rank_state = self._marked
        return save_now(root, content, self._state.roles, self._group, rank_state).error

    def safe_point(self) -> None:
        """Save and stop the run if a rank received a stop signal; only after a `mark` of the current weights.

        Raises:
            Preempted: a signal was received; the end of the last step is saved.
            UserError: saving failed (now or too often), or another job has taken the directory.
        """
        if self._opened.lock.lost:
            raise self._opened.lock.lost
        if self._saver.pending is not None:
            self._saver.poll()
        self._check_failures()
        number = torch.tensor(self._opened.stop.signal)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        if not number:
            return  # no rank has received a signal
        received = signal.Signals(int(number)).name
        step = self._marked[0].step
        if step == self._total_steps:
            return  # nothing is left to do but to finish
        self._run.log.info("%s: the run stops after step %d", received, step)
        self._saver.wait()
        if self._last is None or self._last.step != step or self._last.error:
            with self._run.timers.phase("save", swallow=True):
                self._save()
                self._saver.wait()
        assert self._last is not None, "a save reports its outcome"
        if self._last.error:
            raise self._last.error
        self._run.note_stop({"signal": received, "step": step, "exit_code": EXIT_PREEMPTED})
        raise Preempted(
            f"{received} after step {step}; start the same command again to resume from {self._last.directory}"
        )

    def commit(self) -> None:
        """Wait until the save in progress, if any, is complete."""
        self._saver.wait()

    def finish(self) -> None:
        """Wait for the last save (UserError if it failed)."""
        self._saver.wait()
        if self._last is not None and self._last.error:
            raise self._last.error

    def _report(self, outcome: SaveOutcome) -> None:
        self._last, say = outcome, self._run.log
        self._failures_in_a_row = self._failures_in_a_row + 1 if outcome.error else 0
        if outcome.error:
            self._run.failed_saves.append({"step": outcome.step, "error": outcome.error.found})
            say.error("checkpoint of step %d failed, older ones stay: %s", outcome.step, outcome.error)
        else:
            say.info(
                "checkpoint: %s, %s bytes in %.1f s (%.1f s of waiting)%s",
                outcome.directory,
                f"{outcome.num_bytes:,}",
                outcome.seconds,
                outcome.blocked_seconds,
                "".join(f"; step_{step} deleted" for step in outcome.deleted_steps),
            )

    def _check_failures(self) -> None:
        error = self._last and self._last.error
        if error and self._failures_in_a_row >= MAX_FAILED_SAVES:
            raise UserError(
                f"{self._failures_in_a_row} saves in a row have failed, the last one: {error.found}",
                source=error.source,
                expected=f"fewer than {MAX_FAILED_SAVES}",
                hint=error.hint,
            )
