# SPDX-License-Identifier: Apache-2.0
"""Placement tables in a compressed form that ranks share.

*Rows* are (param, hf_name, kind); *boxes* map a kind to positions in the parameter and in the HF tensor. Ranks that
differ only in TP have equal rows, ranks that differ only in PP or EP have equal boxes, so thousands of ranks need few
of each.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from megatron_rl.weights.families import FUSED_KINDS, NORM_KINDS, ModelShape
from megatron_rl.weights.shard_box import Box, ShardBox, columns, full_box, rows

Row = tuple[str, str, Hashable]  # parameter, HF tensor, kind
BoxPair = tuple[Box, Box]  # in the parameter, in the HF tensor
# Kinds that every TP rank holds whole.
_WHOLE = ("hidden", "head", "router", "router_bias", "logit_bias", "o.bias", "shared_router", "score", "mtp_proj")


class TableRows(tuple[Row, ...]):
    """Rows of a table, compared by identity to find sharing at no cost."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _SameBoxes(dict[Any, BoxPair]):
    def __missing__(self, kind: BoxPair) -> BoxPair:
        return kind


class PlacementTable(Sequence[ShardBox]):
    """Sequence of the `ShardBox`es of a rank, built during iteration: regions of its parameters and of HF tensors.

    Args:
        rows: parameter, HF tensor and kind (such as "gate") of each pair of regions; shared by ranks.
        boxes: kind -> region in the parameter and region in the HF tensor, on this rank.
    """

    def __init__(self, rows: TableRows, boxes: Mapping[Any, BoxPair]) -> None:
        self.rows, self.boxes = rows, boxes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[ShardBox]:
        for param, hf_name, kind in self.rows:
            local_box, hf_box = self.boxes[kind]
            yield ShardBox(param, local_box, hf_name, hf_box)

    def without(self, params: frozenset[str]) -> PlacementTable:
        """Return the table without these parameters; rows stay shared between ranks."""
        return PlacementTable(_select(self.rows, 0, params, keeps=False), self.boxes) if params else self

    def only(self, names: frozenset[str]) -> PlacementTable:
        """Return the table of these HF tensors only; rows stay shared between ranks."""
        return PlacementTable(_select(self.rows, 1, names, keeps=True), self.boxes)


def as_table(placements: Iterable[ShardBox]) -> PlacementTable:
    """Return the shard boxes of a rank as a `PlacementTable`, unchanged if they are one."""
    if isinstance(placements, PlacementTable):
        return placements
    return PlacementTable(TableRows((p.param, p.hf_name, (p.local_box, p.hf_box)) for p in placements), _SameBoxes())


class Share(NamedTuple):
    """A rank's share of tensors: part `index` of `count` equal parts, the last ones possibly shorter under ZeRO-3."""

    count: int
    index: int

    def cut(self, num_rows: int) -> tuple[int, int]:
        """Return the rows [start, stop) of a parameter with `num_rows` under ZeRO-3."""
        size = -(-num_rows // self.count)
        return min(self.index * size, num_rows), min((self.index + 1) * size, num_rows)


@lru_cache(maxsize=64)
def split_boxes(
    shape: ModelShape, of_layer: Share, vocab_rows: int, of_expert: Share | None = None
) -> dict[str, BoxPair]:
    """Return the boxes of a TP rank by kind, in Megatron and in vLLM.

    Fused parameters are `[q; k; v]` of the rank's heads and `[gate; up]` of its columns. With more ranks than KV heads,
    tp / KV heads neighboring ranks hold the same head.

    Args:
        vocab_rows: vocabulary rows per rank, padding included.
        of_expert: share of an expert; `None` means `of_layer`.
    """
    tp_size, tp_rank = of_layer
    sizes, d = shape.kind_sizes(), shape.head_dim
    start, stop = (min((tp_rank + end) * vocab_rows, shape.vocab_size) for end in (0, 1))
    boxes = {kind: (full_box(sizes[kind]), full_box(sizes[kind])) for kind in (*_WHOLE, "layer_scalar")}
    boxes["vocab"] = rows(0, stop - start, sizes["vocab"]), rows(start, stop, sizes["vocab"])
    q_size, kv_size = shape.num_heads // tp_size * shape.query_dim, max(shape.num_kv_heads // tp_size, 1) * d
    kv_start, base = tp_rank * shape.num_kv_heads // tp_size * d, 0
    for kind, first, size in (("q", tp_rank * q_size, q_size), ("k", kv_start, kv_size), ("v", kv_start, kv_size)):
        for name, start in ((f"{kind}.weight", base), (f"{kind}.bias", base), (f"{kind}.norm", 0)):
            boxes[name] = rows(start, start + size, sizes[name]), rows(first, first + size, sizes[name])
        base += size
    o_size = shape.num_heads // tp_size * shape.value_dim
    heads = shape.num_heads // tp_size
    boxes["sinks"] = rows(0, heads, sizes["sinks"]), rows(tp_rank * heads, (tp_rank + 1) * heads, sizes["sinks"])
    boxes["o"] = columns(0, o_size, sizes["o"]), columns(tp_rank * o_size, (tp_rank + 1) * o_size, sizes["o"])
    boxes |= shape.latent.split(sizes, *of_layer) if shape.latent else {}
    if shape.delta_net is not None:
        from megatron_rl.weights.special_parts import split_delta_net

        boxes |= split_delta_net(sizes, shape.delta_net.projections, *of_layer)
    boxes |= shape.full_heads.name(split_boxes(shape.full, of_layer, vocab_rows)) if shape.full_heads else {}
    for prefix, columns_of_all in shape.ffn_sizes().items():
        count, index = of_expert if of_expert and shape.num_experts and not prefix else of_layer
        gate, up, down, ffn = f"{prefix}gate", f"{prefix}up", f"{prefix}down", columns_of_all // count
        mine = index * ffn, (index + 1) * ffn
        boxes[gate] = rows(0, ffn, sizes[gate]), rows(*mine, sizes[gate])
        boxes[up] = rows(ffn, 2 * ffn, sizes[up]), rows(*mine, sizes[up])
        boxes[down] = columns(0, ffn, sizes[down]), columns(*mine, sizes[down])
        boxes[f"{gate}.bias"] = rows(0, ffn, (0,)), (mine,)
        boxes[f"{up}.bias"] = rows(ffn, 2 * ffn, (0,)), (mine,)
        boxes[f"{down}.bias"] = full_box(sizes[f"{down}.bias"]), full_box(sizes[f"{down}.bias"])
    for fused, parts in FUSED_KINDS.items():
        base = 0
        for part in parts if fused in sizes else ():
            local, ((first, last), *_) = boxes[part]
            boxes[f"{fused}.{part}"] = local, rows(base + first, base + last, sizes[fused])
            base += sizes[part][0]
    return boxes


def list_parts(kind: str) -> list[tuple[str, str]]:
    """Return (kind, key in `split_boxes`) of each part of a checkpoint tensor; several parts if the tensor is fused."""
    if kind in FUSED_KINDS:
        return [(part, f"{kind}.{part}") for part in FUSED_KINDS[kind]]
    return [(kind, "hidden" if kind in NORM_KINDS else kind)]


@lru_cache(maxsize=2)
def _select(rows: TableRows, column: int, names: frozenset[str], *, keeps: bool) -> TableRows:
    return TableRows(row for row in rows if (row[column] in names) == keeps)
