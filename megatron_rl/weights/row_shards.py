# SPDX-License-Identifier: Apache-2.0
"""Placement of logical tensors in Megatron's parameters if data parallel ranks shard their rows (ZeRO-3).

FSDP splits n rows like `torch.chunk`: shard i of d has rows [i c, (i + 1) c), c = ceil(n / d), as far as they exist.
Boxes are cut accordingly, possibly to empty ones, so that data parallel ranks share the table's rows. Router biases
and scalars of layers, which are not trained, are not sharded.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import TYPE_CHECKING

from megatron_rl.types import UserError
from megatron_rl.weights.families import DENSE, FUSED_KINDS, SHARED, ModelShape
from megatron_rl.weights.megatron_layout import find_shard_key, find_shares, megatron_placements, padded_vocab_size
from megatron_rl.weights.placement_tables import BoxPair, PlacementTable, Share, split_boxes

if TYPE_CHECKING:
    from megatron_rl.parallel.layout import ParallelLayout

_FUSED = (
    ("q.weight", "k.weight", "v.weight"),
    ("q.bias", "k.bias", "v.bias"),
    *((f"{prefix}gate", f"{prefix}up") for prefix in ("", DENSE, SHARED)),
)
_EXPERT_KINDS = ("gate", "up", "down")


def find_shard_places(layout: ParallelLayout, rank: int) -> tuple[Share, Share]:
    """Return a rank's share of dense parameters, and of experts, under ZeRO-3."""
    at, (dense, experts) = layout.coordinates(rank), layout.shard_sizes
    place = at.cp + layout.cp_size * at.dp
    return Share(dense, place % dense), Share(experts, layout.expert_coordinates(rank).dp % experts)


def check_shards(layout: ParallelLayout, shape: ModelShape, section: str) -> None:
    """Refuse ZeRO-3 on ranks that form no equal groups, or cannot split experts evenly as FSDP requires (UserError)."""
    ranks, (size, replicas) = layout.cp_size * layout.dp_size, layout.shard_sizes
    for count, part, what in ((ranks, size, "DP and CP ranks"), (layout.expert_replicas, replicas, "expert replicas")):
        if count % part:
            raise UserError(
                f"actor.zero_shard_size = {size}: the {count} {what} of {section} are no groups of {part}",
                source=f"actor.zero_shard_size, {section}.*_parallel_size and the number of ranks",
                expected=f"a divisor of {count}, or at least {ranks} for one group",
                hint="set it to the GPUs of a node divided by the tensor parallel size",
            )
    for what, rows in (
        ("gate and up", 2 * shape.ffn_hidden_size // layout.expert_tp_size),
        ("down", shape.hidden_size),
    ):
        if shape.num_experts and rows % replicas:
            raise UserError(
                f"{section}.zero_stage = 3: {replicas} replicas of an expert cannot share the {rows} rows of {what}",
                source=f"{section}.zero_stage, {section}.expert_model_parallel_size and the model's config.json",
                expected=f"a number of replicas that divides {rows}",
                hint=f"use another number of ranks or {section}.expert_model_parallel_size, or {section}.zero_stage=1",
            )


def sharded_placements(shape: ModelShape, layout: ParallelLayout, rank: int) -> PlacementTable:
    """Return the placements of a rank's shards."""
    table = megatron_placements(shape, layout, rank)
    return PlacementTable(table.rows, _cut_boxes(shape, *find_shares(layout, rank), *find_shard_places(layout, rank)))


def find_sharded_key(layout: ParallelLayout, rank: int) -> Hashable:
    """Return a key shared by ranks with equal shards."""
    return find_shard_key(layout, rank), find_shard_places(layout, rank)


@lru_cache(maxsize=256)
def _cut_boxes(
    shape: ModelShape, of_layer: Share, of_expert: Share, dense: Share, experts: Share
) -> dict[str, BoxPair]:
    vocab_rows = padded_vocab_size(shape.vocab_size, of_layer.count) // of_layer.count
    boxes = split_boxes(shape, of_layer, vocab_rows, of_expert)
    num_rows = {kind: local_box[0][1] for kind, (local_box, _) in boxes.items()} | {"vocab": vocab_rows}
    fused = (*_FUSED, *((shape.full_heads.fused,) if shape.full_heads else ()))
    for kinds in (kinds for kinds in fused if kinds[-1] in num_rows):
        num_rows |= dict.fromkeys(kinds, num_rows[kinds[-1]])  # the last part ends at the end of the parameter
    fused = {kind: parts for kind, parts in FUSED_KINDS.items() if parts[0] in num_rows}
    num_rows |= {f"{kind}.{part}": num_rows[part] for kind, parts in fused.items() for part in parts}
    found = {}
    for kind, pair in boxes.items():
        if kind in ("router_bias", "layer_scalar"):
            found[kind] = pair
            continue
        # This rank's rows [low, high) of the parameter, and the box's rows among them, [first, last).
        low, high = (experts if shape.num_experts and kind in _EXPERT_KINDS else dense).cut(num_rows[kind])
        ((start, stop), *rest), ((hf_start, _), *hf_rest) = pair
        first = min(max(start, low), stop)
        last = max(first, min(stop, high))
        local = (first - low, last - low) if first < last else (0, 0)
        found[kind] = (local, *rest), ((hf_start + first - start, hf_start + last - start), *hf_rest)
    return found
