# SPDX-License-Identifier: Apache-2.0
"""Placement of logical tensors if data parallel ranks shard rows of Megatron's parameters (ZeRO-3).

FSDP splits n rows like `torch.chunk`: shard i of d has rows [i c, (i + 1) c), c = ceil(n / d), as far as they exist.
Boxes are cut accordingly, possibly to empty ones, so that data parallel ranks share the table's rows. Router biases,
which are not trained, are not sharded.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from megatron_rl.types import UserError
from megatron_rl.weights.families import DENSE, FUSED_KINDS, SHARED, ModelShape
from megatron_rl.weights.megatron_layout import find_shares, megatron_placements, padded_vocab_size
from megatron_rl.weights.placement_tables import BoxPair, PlacementTable, Share, split_boxes

if TYPE_CHECKING:
    from megatron_rl.parallel.layout import ParallelLayout

_FUSED = (
    ("q.weight", "k.weight", "v.weight"),
    ("q.bias", "k.bias", "v.bias"),
    *((f"{prefix}gate", f"{prefix}up") for prefix in ("", DENSE, SHARED)),
)
_EXPERT_KINDS = ("gate", "up", "down")


class ShardPlace(NamedTuple):
    """One of equal shares of the rows of a parameter."""

    index: int
    count: int

    def cut(self, num_rows: int) -> tuple[int, int]:
        """Return the rows [start, stop) of a parameter with `num_rows`."""
        size = -(-num_rows // self.count)
        return min(self.index * size, num_rows), min((self.index + 1) * size, num_rows)


def find_shard_places(layout: ParallelLayout, rank: int) -> tuple[ShardPlace, ShardPlace]:
    """Return a rank's share of dense parameters, and of experts."""
    at, replicas = layout.coordinates(rank), layout.cp_size * layout.dp_size
    experts = layout.expert_coordinates(rank).dp
    return ShardPlace(at.cp + layout.cp_size * at.dp, replicas), ShardPlace(experts, layout.expert_replicas)


def check_shared_experts(layout: ParallelLayout, shape: ModelShape, section: str) -> None:
    """Refuse expert replicas that cannot split rows evenly, which FSDP requires there (UserError)."""
    replicas = find_shard_places(layout, layout.first_rank)[1].count
    for what, rows in (
        ("gate and up", 2 * shape.ffn_hidden_size // layout.expert_tp_size),
        ("down", shape.hidden_size),
    ):
        if rows % replicas:
            raise UserError(
                f"{section}.zero_stage = 3: {replicas} replicas of an expert cannot share the {rows} rows of {what}",
                source=f"{section}.zero_stage, {section}.expert_model_parallel_size and the model's config.json",
                expected=f"a number of replicas that divides {rows}",
                hint=f"use another number of ranks or {section}.expert_model_parallel_size, or {section}.zero_stage=1",
            )


def training_placements(
    shape: ModelShape, layout: ParallelLayout, rank: int, *, is_fully_sharded: bool
) -> PlacementTable:
    """Return the placements of a rank's parameters, or of their shards (ZeRO-3)."""
    return (row_shard_placements if is_fully_sharded else megatron_placements)(shape, layout, rank)


def find_shard_key(layout: ParallelLayout, rank: int, *, is_fully_sharded: bool) -> Hashable:
    """Return a key shared by ranks with equal placements."""
    at, experts = layout.coordinates(rank), layout.expert_coordinates(rank)
    return at.tp, at.pp, experts.tp, experts.ep, find_shard_places(layout, rank) if is_fully_sharded else None


def row_shard_placements(shape: ModelShape, layout: ParallelLayout, rank: int) -> PlacementTable:
    """Return the placements of a rank's parameter shards."""
    table = megatron_placements(shape, layout, rank)
    return PlacementTable(table.rows, _cut_boxes(shape, *find_shares(layout, rank), *find_shard_places(layout, rank)))


@lru_cache(maxsize=256)
def _cut_boxes(
    shape: ModelShape, of_layer: Share, of_expert: Share, dense: ShardPlace, experts: ShardPlace
) -> dict[str, BoxPair]:
    vocab_rows = padded_vocab_size(shape.vocab_size, of_layer.count) // of_layer.count
    boxes = split_boxes(shape, of_layer, vocab_rows, of_expert)
    num_rows = {kind: local_box[0][1] for kind, (local_box, _) in boxes.items()} | {"vocab": vocab_rows}
    for kinds in (kinds for kinds in _FUSED if kinds[-1] in num_rows):
        num_rows |= dict.fromkeys(kinds, num_rows[kinds[-1]])  # the last part ends at the end of the parameter
    fused = {kind: parts for kind, parts in FUSED_KINDS.items() if parts[0] in num_rows}
    num_rows |= {f"{kind}.{part}": num_rows[part] for kind, parts in fused.items() for part in parts}
    found = {}
    for kind, pair in boxes.items():
        place = experts if shape.num_experts and kind in _EXPERT_KINDS else dense
        found[kind] = pair if kind == "router_bias" else _cut(pair, *place.cut(num_rows[kind]))
    return found


def _cut(pair: BoxPair, low: int, high: int) -> BoxPair:
    """Restrict boxes to rows [low, high), relative to `low`."""
    ((start, stop), *rest), ((hf_start, _), *hf_rest) = pair
    first = min(max(start, low), stop)
    last = max(first, min(stop, high))
    local = (first - low, last - low) if first < last else (0, 0)
    return (local, *rest), ((hf_start + first - start, hf_start + last - start), *hf_rest)
