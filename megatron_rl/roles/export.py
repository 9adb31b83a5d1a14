# SPDX-License-Identifier: Apache-2.0
"""The actor in Hugging Face format, and the files that belong to a model beside its weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.huggingface import ShardedModel, save_huggingface
from megatron_rl.checkpoint.side_files import find_model_files, list_side_files
from megatron_rl.config.schema import RunConfig
from megatron_rl.parallel.collectives import raise_together, world
from megatron_rl.resharding.planner import group_shards
from megatron_rl.training.laid_out import LaidOutModel
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.weights.shard_box import ShardBox


def actor_export(config: RunConfig, model: LaidOutModel, mtp: LaidOutModel | None = None) -> Callable[[Path], None]:
    """What writes the actor in HF format, or its adapters in PEFT's, with the files of `model.path`; collective.

    Args:
        config: of the run.
        model: of the actor.
        mtp: the layer behind its last one, where it is trained; else the files keep the one of `model.path`.
    """
    base = Path(config.model.path).absolute()  # a user's function may change the working directory
    model_files = find_model_files(base)

    def write(model: PackedModel, directory: Path) -> None:
        part: Any = model.trained
        params: Any = part.params  # tensors: what is in NF4 is not trained
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
    """The model of `part` with the layer behind its last, whose parameters get names of their own."""

    def place(rank: int) -> list[ShardBox]:
        found = mtp.placements(rank) if rank in mtp.layout.ranks else ()
        return [*part.placements(rank), *(replace(p, param=f"mtp.{p.param}") for p in found)]

    def find_key(rank: int) -> Hashable:
        return part.shard_key(rank), mtp.shard_key(rank) if rank in mtp.layout.ranks else None

    params: Any = {f"mtp.{name}": param for name, param in mtp.params.items()}
    shards = group_shards(place, find_key, part.layout.ranks)
    return replace(model, shards=shards, params={**model.params, **params}, mtp=mtp.shape)


def side_files(config: RunConfig, path: str) -> dict[str, Path]:
    """What belongs to the model of a role beside its weights."""
    tokenizer = config.model.tokenizer
    return list_side_files(Path(path), Path(tokenizer) if tokenizer else None)
