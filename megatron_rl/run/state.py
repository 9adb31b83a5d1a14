# SPDX-License-Identifier: Apache-2.0
"""Everything a checkpoint of a program contains, and the export of its actor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_rl.checkpoint.directory import RunContent
from megatron_rl.checkpoint.files import find_model_files, list_side_files
from megatron_rl.checkpoint.huggingface import ShardedModel, save_huggingface
from megatron_rl.checkpoint.pieces import SavedRole
from megatron_rl.checkpoint.saving import RankState, read_rng
from megatron_rl.config.schema import RunConfig
from megatron_rl.parallel.collectives import failing_together, raise_together, world
from megatron_rl.rollout.stream import RolloutStream
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.setup import LaidOutModel
from megatron_rl.transfer.planner import group_shards
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
    """Everything that changes while a program trains.

    Attributes:
        roles: trained roles of this rank.
        parts: other objects by name, whose `state_dict` is JSON for their `load_state_dict`.
        side_files: files besides weights, by role.
        rollouts: unfinished responses; `None` if all end in their step.
    """

    roles: Mapping[str, SavedRole]
    parts: Mapping[str, Any]
    side_files: Mapping[str, Mapping[str, Path]]
    rollouts: RolloutStream | None = None

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
