# SPDX-License-Identifier: Apache-2.0
"""Save an actor after one update and continue in any layout; shared by the tests of checkpoint/.

Optimizer states are compared as logical tensors, gathered here from the pieces of all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from role_setups import take_step

from actor_runs import ALGORITHM, Case, build_actor, build_batch
from distributed import run_ranks
from megatron_rl.checkpoint.directory import RunContent
from megatron_rl.checkpoint.files import list_side_files
from megatron_rl.checkpoint.pieces import Piece, make_state_pieces, make_weight_pieces
from megatron_rl.checkpoint.resuming import ResumedRun, load_training_state
from megatron_rl.checkpoint.saving import CheckpointSaver, SaveOutcome
from megatron_rl.training.roles.actor import Actor
from megatron_rl.weights.megatron_layout import PADDED_PARAMETERS, ROUTER_BIAS, megatron_global_placements
from megatron_rl.weights.shard_box import box_slices

State = dict[str, Any]  # {"epoch": 1, ...}
STATE: State = {"prompts": {"epoch": 1, "offset": 6, "num_prompts": 16}, "kl_coef": 0.1 + 0.2, "best": None}


def make_content(path: Path, step: int = 1, policy_version: int = 1) -> RunContent:
    """Return the run's part of a checkpoint."""
    return RunContent(step, policy_version, "trainer: {}\n", STATE, {"actor": list_side_files(path)})


def make_saver(root: Path, outcomes: list[SaveOutcome], **changes: Any) -> CheckpointSaver:
    """A saver whose outcomes go to a list."""
    settings = dict(async_save=False, keep_last=None, keep_best=True) | changes
    return CheckpointSaver(root, dist.group.WORLD, report=outcomes.append, **settings)


def update(actor: Actor, case: Case) -> dict[str, float]:
    """One optimizer step on the fixed batch."""
    batch = build_batch(actor.model, case)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    return take_step(actor, next(batch.minibatches()), ALGORITHM)


def snapshot(actor: Actor) -> list[Piece]:
    """Copies of all pieces that this rank has."""
    rank = dist.get_rank()
    model = actor.model
    weights = make_weight_pieces(megatron_global_placements(model.shape), model.placements(rank), model.params)
    as_saved = [p if p.key.endswith(ROUTER_BIAS) else replace(p, data=p.data.to(model.dtype)) for p in weights]
    pieces = [*as_saved, *make_state_pieces(actor, rank, None)]
    return [Piece(p.key, p.shape, p.offset, p.data.clone()) for p in pieces]


def join_pieces(ranks: list[list[Piece]]) -> dict[str, torch.Tensor]:
    """Whole tensors; every element is held by some rank, and replicas have the same bits."""
    whole: dict[str, torch.Tensor] = {}
    for piece in (piece for pieces in ranks for piece in pieces):
        tensor = whole.setdefault(piece.key, torch.full(piece.shape, float("nan"), dtype=piece.data.dtype))
        part = tensor[box_slices(piece.box)].view(piece.data.shape)
        assert part.isnan().all() or torch.equal(part[~part.isnan()], piece.data[~part.isnan()]), piece.key
        part.copy_(piece.data)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def _save_on_rank(rank: int, world_size: int, case: Case, path: Path, root: Path, settings: State) -> Any:
    actor, outcomes = build_actor(case, path), []
    update(actor, case)
    saver = make_saver(root, outcomes, **settings)
    saver.save(make_content(path), {"actor": actor})
    saved = snapshot(actor)
    metrics = update(actor, case)  # continues while the checkpoint is being written
    saver.wait()
    if outcomes[0].error is not None:
        raise outcomes[0].error
    return outcomes[0], saved, metrics, torch.rand(3), snapshot(actor)


def save_actor(case: Case, path: Path, root: Path, **settings: Any) -> list[Any]:
    """Update, save, update again; of every rank: outcome, pieces then, metrics after, numbers drawn, pieces after."""
    return run_ranks(_save_on_rank, case.world_size, case, path, root, settings, timeout=100)


def resume(actor: Actor, path: Path, directory: Path) -> ResumedRun:
    """Load a checkpoint into an actor."""
    return load_training_state(
        directory, {"actor": actor}, side_files={"actor": list_side_files(path)}, group=dist.group.WORLD
    )


def _resume_on_rank(rank: int, world_size: int, case: Case, path: Path, directory: Path) -> Any:
    actor = build_actor(case, path)
    with torch.no_grad():
        for param in actor.model.params.values():
            param.fill_(7.0)  # all of it comes from the checkpoint
    for name, param in actor.model.params.items():
        if name.endswith(PADDED_PARAMETERS):
            param.zero_()
    run = resume(actor, path, directory)
    loaded = snapshot(actor)
    return run, loaded, update(actor, case), torch.rand(3), snapshot(actor)


def resume_actor(case: Case, path: Path, directory: Path) -> list[Any]:
    """Load and update; of every rank: the run, pieces loaded, metrics, numbers drawn, pieces after."""
    return run_ranks(_resume_on_rank, case.world_size, case, path, directory, timeout=100)
