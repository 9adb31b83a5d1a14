# SPDX-License-Identifier: Apache-2.0
"""Saving of training checkpoints, synchronously or in the background.

*Taking* lists the pieces of this rank (with `async_save` it copies them to the host). *Writing* stores them under a
temporary name, without communication, in a thread with `async_save`. *Committing* is collective: rank 0 checks that the
files cover every tensor, renames the directory, moves `latest`, and prunes. An error on any rank fails the save on all
ranks; older checkpoints stay.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save as to_safetensors

from megatron_rl.checkpoint.directory import RunContent, finish_directory, make_manifest, point_at, prune
from megatron_rl.checkpoint.files import FileRecord, explain_os_error, explain_write_error, write_file
from megatron_rl.checkpoint.huggingface import do_on_first
from megatron_rl.checkpoint.pieces import (
    Piece,
    SavedRole,
    choose_saved,
    count_steps,
    find_holders,
    make_state_pieces,
    make_weight_pieces,
)
from megatron_rl.checkpoint.torch_dist import Chunk, ChunkWriter
from megatron_rl.parallel.collectives import raise_together, read_rng, share_object
from megatron_rl.types import UserError
from megatron_rl.weights.megatron_layout import ROUTER_BIAS, megatron_global_placements

# State of a single rank: folder in the checkpoint -> tensors by name.
RankState = Mapping[str, Mapping[str, torch.Tensor]]
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveOutcome:
    """Result of a save, equal on every rank."""

    step: int
    directory: Path
    seconds: float  # from the call of `save` to the commit
    blocked_seconds: float  # of these, the time that training waited
    num_bytes: int = 0  # written by all ranks; 0 after an error
    deleted_steps: tuple[int, ...] = ()
    error: UserError | None = None


@dataclass
class _Pending:
    content: RunContent
    manifest: dict[str, Any]
    partial: Path
    is_best: bool
    started: float
    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    records: list[FileRecord] = field(default_factory=list)
    error: UserError | None = None

    @contextmanager
    def keeping_error(self, rank: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = self.explain(error, rank)

    def explain(self, error: Exception, rank: int) -> UserError:
        if isinstance(error, UserError | OSError | SafetensorError):
            return explain_write_error(error, self.partial)
        from megatron_rl.observability.failures import Scene, explain

        _LOG.debug("checkpoint of step %d", self.content.step, exc_info=error)
        return explain(error, Scene(rank, self.content.step, "save", Path("logs", f"rank{rank}.log")))


@dataclass(eq=False)
class CheckpointSaver:
    """Writer of the checkpoints of one run."""

    root: Path  # `<run_dir>/checkpoints`
    group: dist.ProcessGroup  # all ranks, with a backend for CPU tensors
    async_save: bool  # write in the background; while a save is `pending`, `poll` must be called regularly
    keep_last: int | None  # newest checkpoints to keep; `None` keeps all
    keep_best: bool
    report: Callable[[SaveOutcome], None]  # called on every rank with each outcome
    pending: tuple[_Pending, threading.Thread] | None = field(default=None, init=False)  # the save in progress
    _blocked: float = field(default=0.0, init=False)  # seconds that training has waited for the pending save

    def save(
        self,
        content: RunContent,
        roles: Mapping[str, SavedRole],
        *,
        with_optimizer: bool = True,
        is_best: bool = False,
        export: Callable[[Path], None] | None = None,
        rank_state: RankState | None = None,
    ) -> None:
        """Save a checkpoint after finishing a pending save; collective. Errors go to `report`, and are not raised.

        Args:
            content: with `side_files` of every role of the job, on any rank.
            with_optimizer: include optimizer and RNG states, which resuming needs.
            export: called on every rank to write the HF model into a given directory of the checkpoint.
            rank_state: folder -> tensors of this rank that belong to no role; by default its RNG states.
        """
        self.wait()
        started = time.monotonic()
        partial = self.root / f"step_{content.step}.partial"
        led = {name: role for name, role in roles.items() if role.model.groups.layout.first_rank == self.group.rank()}
        manifest = make_manifest(content, led, with_optimizer=with_optimizer)
        pending = _Pending(content, manifest, partial, is_best, started)

        def prepare() -> None:
            if partial.exists():
                shutil.rmtree(partial)
            for folder in (".", *{*roles, *content.side_files}):
                (partial / folder).mkdir(parents=True)

        try:
            do_on_first(self.group, prepare)
            if export is not None:
                export(partial / "huggingface")
        except Exception as error:
            raised_on = getattr(error, "raised_on", None)
            if raised_on is None:
                raise  # raised on this rank alone: all other ranks wait in a collective
            return self._finish(pending, pending.explain(error, raised_on))
        pieces, rank = {}, self.group.rank()
        alone = (rank_state or {"rng": read_rng()}) if with_optimizer else {}
        with pending.keeping_error(rank):
            pieces = {name: list_pieces(role, rank, with_optimizer) for name, role in roles.items()}
            if self.async_save:
                pieces = {name: [copy_to_host(piece) for piece in found] for name, found in pieces.items()}
        if self.async_save:
            arguments = pending, pieces, alone, rank
            thread = threading.Thread(target=_write, args=arguments, name="checkpoint", daemon=True)
            thread.start()
            self.pending, self._blocked = (pending, thread), time.monotonic() - started
            return None
        _write(pending, pieces, alone, rank)
        return self._commit(pending)

    def poll(self) -> None:
        """Commit the save in `pending` if every rank has finished writing; collective, cheap."""
        assert self.pending is not None
        pending, thread = self.pending
        is_done = torch.tensor(int(not thread.is_alive()))
        dist.all_reduce(is_done, dist.ReduceOp.MIN, group=self.group)
        if is_done:
            self._commit(pending)

    def wait(self) -> None:
        """Wait for the pending save and commit it; collective."""
        if self.pending is not None:
            began, (pending, thread) = time.monotonic(), self.pending
            thread.join()
            self._blocked += time.monotonic() - began
            self._commit(pending)

    def _commit(self, pending: _Pending) -> None:
        began, deleted, num_bytes = time.monotonic(), [], 0
        try:
            raise_together(pending.error, self.group)
            parts: list[Any] = [None] * self.group.size() if self.group.rank() == 0 else []
            mine = pending.chunks, pending.records, pending.manifest["roles"]
            dist.gather_object(mine, parts or None, group=self.group, group_dst=0)
            if self.group.rank() == 0:
                with pending.keeping_error(0):
                    num_bytes = finish_directory(pending.partial, pending.manifest, pending.content, parts)
                    point_at(self.root, "latest", pending.content.step)
                    if pending.is_best:
                        point_at(self.root, "best", pending.content.step)
                    deleted = prune(self.root, self.keep_last, self.keep_best)
            raise_together(pending.error, self.group)
        except UserError as caught:
            return self._finish(pending, caught)
        self._blocked += time.monotonic() - began
        found = share_object((num_bytes, tuple(deleted)), self.group, dist.get_global_rank(self.group, 0))
        return self._finish(pending, None, *found)

    def _finish(
        self, pending: _Pending, error: UserError | None, num_bytes: int = 0, deleted: tuple[int, ...] = ()
    ) -> None:
        if error is not None and self.group.rank() == 0:
            shutil.rmtree(pending.partial, ignore_errors=True)
        seconds = time.monotonic() - pending.started
        blocked, self.pending = seconds if self.pending is None else self._blocked, None
        directory = self.root / f"step_{pending.content.step}"
        self.report(SaveOutcome(pending.content.step, directory, seconds, blocked, num_bytes, deleted, error))


def save_now(
    root: Path,
    content: RunContent,
    roles: Mapping[str, SavedRole],
    group: dist.ProcessGroup,
    rank_state: RankState | None = None,
) -> SaveOutcome:
    """Write `<root>/step_<N>` without pruning; collective; see `CheckpointSaver.save`."""
    outcomes: list[SaveOutcome] = []
    saver = CheckpointSaver(root, group, async_save=False, keep_last=None, keep_best=False, report=outcomes.append)
    saver.save(content, roles, rank_state=rank_state)
    return outcomes[0]


def list_pieces(role: SavedRole, rank: int, with_optimizer: bool) -> list[Piece]:
    """List the pieces of a role that this rank saves."""
    holders, table = find_holders(role), megatron_global_placements(role.model.shape)
    weights = make_weight_pieces(table, choose_saved(role, holders, rank), role.model.params)
    pieces = [
        piece if piece.key.endswith(ROUTER_BIAS) else replace(piece, data=piece.data.to(role.model.dtype))
        for piece in weights
    ]
    if with_optimizer:
        assert count_steps(role) == role.optimizer.steps, "the optimizer and its role count different steps"
        pieces += make_state_pieces(role, rank, holders)
    return pieces


def copy_to_host(piece: Piece) -> Piece:
    """Copy a piece to host memory."""
    return Piece(piece.key, piece.shape, piece.offset, piece.data.detach().to("cpu", copy=True))


def _write(pending: _Pending, pieces: Mapping[str, list[Piece]], rank_state: RankState, rank: int) -> None:
    with pending.keeping_error(rank):
        for name, found in pieces.items():
            if not found:
                continue
            writer = ChunkWriter(pending.partial / name / f"__{rank}_0.distcp")
            try:
                for piece in found:
                    writer.add(piece.key, piece.shape, piece.offset, piece.data)
                pending.records.append(writer.close())
            except OSError as error:
                num_bytes = sum(piece.data.numel() * piece.data.element_size() for piece in found)
                raise explain_os_error(error, pending.partial, num_bytes) from None
            finally:
                writer.abandon()
            pending.chunks[name] = writer.chunks
        for folder, tensors in rank_state.items():
            (pending.partial / folder).mkdir(exist_ok=True)
            path = pending.partial / folder / f"rank_{rank}.safetensors"
            pending.records.append(write_file(path, to_safetensors(dict(tensors))))
