# SPDX-License-Identifier: Apache-2.0
"""Pieces of a role's checkpoint state: views of live memory, each with its place in a global tensor.

Saving writes the pieces, loading fills them. Weights have megatron-core's global names (`weights/megatron_layout.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.huggingface import check_checkpoint, load_huggingface
from megatron_rl.checkpoint.torch_dist import METADATA_FILE, ChunkReader
from megatron_rl.transfer.planner import group_shards
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import GlobalPlacement, Table, megatron_global_placements
from megatron_rl.weights.shard_box import Box, ShardBox, box_slices, box_volume, intersect, localize

Holders = dict[tuple[str, Box], list[int]]

# An optimizer state is the global tensor `<STATE_PREFIX><state>.<HF name>`; Muon's momentum is its first moment.
STATE_PREFIX, MOMENTS, MAIN_PARAM = "optimizer.", ("exp_avg", "exp_avg_sq"), "main_param"


@dataclass(frozen=True)
class SavedRole:
    """An actor or a critic, as checkpoints use it.

    Attributes:
        model: trained weights, a `training.packed_model.PackedModel` or `training.adapted_model.Adapters`.
        optimizer: a `training.optimizer.Optimizer`, or the stand-in of a frozen model.
    """

    model: Any
    optimizer: Any


@dataclass(frozen=True)
class Piece:
    """A box of the global tensor `key`, as a view of live memory.

    Attributes:
        offset: start of the box; `data` may omit leading dimensions of size 1.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: torch.Tensor

    @property
    def box(self) -> Box:
        """The box in the global tensor."""
        sizes = (*[1] * (len(self.shape) - self.data.ndim), *self.data.shape)
        return tuple((start, start + size) for start, size in zip(self.offset, sizes, strict=True))


def make_weight_pieces(
    table: Table, placements: Sequence[ShardBox], params: Mapping[str, torch.Tensor]
) -> Iterator[Piece]:
    """Yield the weights in `placements` as pieces of megatron-core's global tensors."""
    for placement in placements:
        for place in table[placement.hf_name]:
            part = intersect(place.hf_box, placement.hf_box)
            if part is not None:
                where = localize(part, (placement.local_box, placement.hf_box))
                yield locate(place, part, params[placement.param][box_slices(where)])


def locate(place: GlobalPlacement, part: Box, data: torch.Tensor) -> Piece:
    """Return `data`, the box `part` of a logical tensor, as a piece of the global tensor that contains it."""
    inner = tuple(start for start, _ in localize(part, (place.box, place.hf_box)))
    return Piece(place.key, place.shape, (*place.leading, *inner), data)


def find_holders(role: SavedRole) -> Holders:
    """Return the ranks that hold each box of a role's logical tensors: (name, box) -> ranks."""
    holders: Holders = {}
    for shard in group_shards(role.model.placements, role.model.shard_key, role.model.groups.layout.ranks):
        for p in shard.placements:
            if box_volume(p.hf_box):
                holders.setdefault((p.hf_name, p.hf_box), []).extend(shard.ranks)
    return holders


def choose_saved(role: SavedRole, holders: Holders, rank: int) -> list[ShardBox]:
    """Choose the placements that `rank` saves: one holder saves each box, and all save about equally much."""
    loads, mine = dict.fromkeys(role.model.groups.layout.ranks, 0), set()
    for (name, box), ranks in sorted(holders.items(), key=lambda item: -box_volume(item[0][1])):
        owner = min(ranks, key=loads.__getitem__)
        loads[owner] += box_volume(box)
        if owner == rank:
            mine.add((name, box))
    saved = []
    for p in role.model.placements(rank):
        if (p.hf_name, p.hf_box) in mine:
            mine.remove((p.hf_name, p.hf_box))  # only once, even if the rank holds it under two names
            saved.append(p)
    return saved


def check_weights(directory: str | Path, shape: ModelShape, may_lack: Collection[str] = ()) -> None:
    """Check weights in HF or Megatron format against the model's config; reads headers only.

    Raises:
        UserError: names the first missing (unless in `may_lack`) or mismatched tensors.
    """
    directory = Path(directory)
    if not (directory / METADATA_FILE).is_file():
        check_checkpoint(directory, shape, may_lack=may_lack)
        return
    table = {name: places for name, places in megatron_global_placements(shape).items() if name not in may_lack}
    check_global_shapes(ChunkReader(directory), table, directory)


def check_global_shapes(reader: ChunkReader, table: Table, weights: Path) -> None:
    """Check a distributed checkpoint against the model's config; padded vocabulary rows are allowed."""
    if any(key.endswith(".lora_A.weight") for key in reader.tensors):
        raise UserError(
            "the checkpoint holds adapters, and not the model that they belong to",
            source=str(weights),
            expected="the weights of a whole model",
            hint="the checkpoint's directory huggingface/ is in PEFT's format: start from it by actor.lora.path, or "
            "make one model of both with PEFT's merge_and_unload()",
        )
    wrong = []
    for key, shape in {place.key: place.shape for places in table.values() for place in places}.items():
        found = reader.tensors.get(key, ((), None))[0]
        is_padded = (
            key in ("embedding.word_embeddings.weight", "output_layer.weight")
            and found[1:] == shape[1:]
            and found[:1] >= shape[:1]
        )
        if found != shape and not is_padded:
            wrong.append(f"{key} is {list(found) if found else 'missing'}, config.json says {list(shape)}")
    if wrong:
        raise UserError(
            f"{len(wrong)} tensor(s) do not match: {'; '.join(wrong[:3])}",
            source=str(weights),
            expected="the tensors that config.json describes",
            hint="config.json and checkpoint belong to two models",
        )


@torch.no_grad()
def load_weights(
    directory: Path,
    shape: ModelShape,
    placements: Iterable[ShardBox],
    params: Mapping[str, torch.Tensor],
    *,
    may_lack: Collection[str] = (),
) -> None:
    """Fill `params` in place from a model in HF format or a Megatron distributed checkpoint.

    Values are converted to the dtype of the parameters; padding and missing tensors in `may_lack` become zero.

    Raises:
        UserError: not a checkpoint, another model, or a damaged file.
    """
    if not (directory / METADATA_FILE).is_file():
        load_huggingface(directory, placements, params, may_lack=may_lack)
        return
    reader = ChunkReader(directory)
    for tensor in params.values():
        tensor.zero_()
    table = megatron_global_placements(shape)
    lacking = {place.key for name in may_lack for place in table.get(name, ())} - reader.tensors.keys()
    for piece in make_weight_pieces(table, list(placements), params):
        if piece.key not in lacking:
            reader.read(piece.key, piece.box, piece.data)
