# SPDX-License-Identifier: Apache-2.0
"""Pieces of a role's checkpoint state: views of live memory, each with its place in a global tensor.

Saving writes the pieces, loading fills them. Weights have megatron-core's global names (`weights/megatron_layout.py`).

States of megatron-core's optimizers are stored as `optimizer.exp_avg.<HF name>`, `optimizer.exp_avg_sq.<HF name>` and,
if the weights are not float32, `optimizer.main_param.<HF name>`, for every layout, with or without ZeRO. Under ZeRO a
rank owns a flat range of each parameter: at most three boxes. (megatron-core's own `fully_reshardable` format gathers a
model replica on one rank, does not support torch's AdamW, and does not reshard from EP > 1 to EP = 1.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.checkpoint.huggingface import check_checkpoint, load_huggingface, refuse_mismatch
from megatron_rl.checkpoint.torch_dist import METADATA_FILE, ChunkReader
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.transfer.planner import group_shards
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import GlobalPlacement, Table, megatron_global_placements
from megatron_rl.weights.shard_box import Box, ShardBox, box_shape, box_slices, box_volume, intersect, localize

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

Holders = dict[tuple[str, Box], list[int]]

# An optimizer state is the global tensor `<STATE_PREFIX><state>.<HF name>`; Muon's momentum is its first moment.
STATE_PREFIX, MOMENTS, MAIN_PARAM = "optimizer.", ("exp_avg", "exp_avg_sq"), "main_param"


@dataclass(frozen=True)
class SavedRole:
    """An actor or a critic, as checkpoints use it."""

    model: Any  # trained weights, a `training.packed_model.PackedModel` or `training.adapted_model.Adapters`
    optimizer: Any  # a `training.optimizer.Optimizer`, or the stand-in of a frozen model


@dataclass(frozen=True)
class Piece:
    """A box of the global tensor `key`, as a view of live memory."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]  # start of the box; `data` may omit leading dimensions of size 1
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
    """Check weights in HF or Megatron format against the config (UserError: names tensors); reads headers only."""
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
    refuse_mismatch(wrong, weights)


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


@dataclass(frozen=True)
class StateShard:
    """The part of a parameter whose optimizer state is on this rank."""

    param: str
    start: int  # first element in the flattened parameter
    is_sharded: bool  # replicas hold different parts (ZeRO)
    optimizer: torch.optim.Optimizer
    main: torch.Tensor  # float32 values; `optimizer.state[main]` is their state


def list_state_shards(stages: torch.nn.Module, whole: MegatronOptimizer) -> list[StateShard]:
    """List the parts of parameters that this rank's optimizer updates."""
    from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer  # files are read without it

    names, shards = {param: name for name, param in stages.named_parameters()}, []
    parts: list[Any] = whole.chained_optimizers if isinstance(whole, ChainedOptimizer) else [whole]
    for part in parts:
        if part.is_stub_optimizer:
            continue
        groups = part.optimizer.param_groups
        if isinstance(part, DistributedOptimizer):
            for param, (group, index) in part.model_param_group_index_map.items():
                start = part._get_model_param_range_map(param)["param"].start
                shards.append(StateShard(names[param], start, True, part.optimizer, groups[group]["params"][index]))
        else:
            name_of = {id(getattr(param, "main_param", param)): name for param, name in names.items()}
            mains = [main for group in groups for main in group["params"]]
            shards += [StateShard(name_of[id(main)], 0, False, part.optimizer, main) for main in mains]
    return shards


def count_steps(role: SavedRole) -> int:
    """Return the steps that this rank's optimizer has taken; without parameters, `role.optimizer.steps`."""
    found = set()
    for shard in list_state_shards(role.model.stages, role.optimizer.megatron):
        if role.optimizer.moments(shard.main) != MOMENTS:
            continue
        state = shard.optimizer.state.get(shard.main, {})
        group = next(g for g in shard.optimizer.param_groups if any(p is shard.main for p in g["params"]))
        found.add(int(state.get("step", group.get("step", 0)) if state else 0))
    assert len(found) <= 1, f"parameters of one optimizer have taken {sorted(found)} steps"
    return found.pop() if found else role.optimizer.steps


def make_state_pieces(role: SavedRole, rank: int, saved_by: Holders | None) -> Iterator[Piece]:
    """Yield this rank's optimizer states as pieces: all, or with `saved_by`, the holders of each box, those to save."""
    from megatron_rl.weights.packed_experts import find_fused

    shapes = role.model.shape.logical_tensors()
    by_param: dict[str, dict[str, list[ShardBox]]] = {}  # parameter -> its names in the tables, in order
    for placement in role.model.placements(rank):
        by_param.setdefault(find_fused(placement.param)[0], {}).setdefault(placement.param, []).append(placement)
    for shard in list_state_shards(role.model.stages, role.optimizer.megatron):
        state = shard.optimizer.state.get(shard.main, {})
        flat = {name: state[name].view(-1) for name in MOMENTS if name in state}
        if role.model.dtype != torch.float32:
            flat[MAIN_PARAM] = shard.main.detach().view(-1)
        first = shard.start  # start of the part in the current table parameter
        for name, placements in by_param[shard.param].items():
            size = tuple(role.model.params[name].shape)
            mine = {key: values[max(-first, 0) : max(math.prod(size) - first, 0)] for key, values in flat.items()}
            if saved_by is not None:
                layout, is_sharded = role.model.groups.layout, shard.is_sharded
                placements = [
                    p
                    for p in placements
                    if box_volume(p.hf_box)
                    and _saves(layout, rank, min(saved_by[p.hf_name, p.hf_box]), p, is_sharded=is_sharded)
                ]
            yield from _cut(max(first, 0), mine, placements, size, shapes)
            first -= math.prod(size)


def _cut(
    start: int,
    flat: Mapping[str, torch.Tensor],
    placements: Sequence[ShardBox],
    param_shape: tuple[int, ...],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[Piece]:
    length = len(next(iter(flat.values()))) if flat else 0
    first = 0
    for box in flat_boxes(start, start + length, param_shape):
        for placement in placements:
            part = intersect(box, placement.local_box)
            if part is None:
                continue
            inner = tuple((a - low, b - low) for (a, b), (low, _) in zip(part, box, strict=True))
            offset = tuple(start for start, _ in localize(part, (placement.hf_box, placement.local_box)))
            for name, values in flat.items():
                view = values[first : first + box_volume(box)].view(box_shape(box))[box_slices(inner)]
                yield Piece(f"{STATE_PREFIX}{name}.{placement.hf_name}", shapes[placement.hf_name], offset, view)
        first += box_volume(box)


def flat_boxes(start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
    """Return the boxes of elements [start, stop) of a flattened vector, matrix or filter [n, 1, m], in order."""
    if len(shape) == 1:
        return [((start, stop),)] if start < stop else []
    (_, *middle, width), boxes = shape, []
    assert all(size == 1 for size in middle), "experts are seen as matrices"
    between = [(0, 1)] * len(middle)
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:
            end = min(stop, (row + 1) * width)
            boxes.append(((row, row + 1), *between, (column, column + end - start)))
        else:
            end = stop // width * width
            boxes.append(((row, end // width), *between, (0, width)))
        start = end
    return boxes


def _saves(layout: ParallelLayout, rank: int, first_holder: int, placement: ShardBox, *, is_sharded: bool) -> bool:
    """Return whether `rank` saves its optimizer state of a box that `first_holder` is the first rank to hold.

    Under ZeRO (`is_sharded`) each data parallel replica saves its part; otherwise only `first_holder` does. Ranks of
    another TP or PP index hold duplicates (norms, a tied embedding).
    """
    if not is_sharded:
        return rank == first_holder
    if ".experts." in placement.param:  # replicated like the expert layers
        of_expert, holder = layout.expert_coordinates(rank), layout.expert_coordinates(first_holder)
        return (of_expert.tp, of_expert.pp, of_expert.ep) == (holder.tp, holder.pp, holder.ep)
    mine, first = layout.coordinates(rank), layout.coordinates(first_holder)
    return (mine.tp, mine.pp) == (first.tp, first.pp)
