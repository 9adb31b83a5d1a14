# SPDX-License-Identifier: Apache-2.0
"""Classes of tensors that a job shards alike, found without a walk over the placements of all ranks.

Tensors that the same shards hold in the same boxes, on both sides of a move, form a *class*; a plan for one holds for
all. A *piece* is a distinct box of a logical tensor on the source side, owned by all shards that hold it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_rl.weights.placement_tables import BoxPair, PlacementTable, Row, TableRows, as_table
from megatron_rl.weights.shard_box import Box, ShardBox, box_volume

Cut = tuple[TableRows, Hashable]  # rows of the table, kind


@dataclass(frozen=True)
class Shard:
    """Ranks, ascending, that hold the same placements."""

    ranks: tuple[int, ...]
    placements: Sequence[ShardBox]


@dataclass(slots=True, eq=False)
class BoxPiece:
    """A box that source shards hold, the same in every tensor of a class.

    Attributes:
        holders: index of a source shard -> (place, see `TensorIndex`; box in the parameter).
    """

    box: Box
    holders: dict[int, tuple[int, Box]]


@dataclass(slots=True, eq=False)
class TensorClass:
    """Logical tensors that the same shards hold in the same boxes, before and after a move: one plan serves all."""

    pieces: list[BoxPiece]
    targets: dict[Box, list[int]]  # box of a tensor -> destination shards that place it
    names: list[str] = field(default_factory=list)


class TensorIndex:
    """Index from each logical tensor to its *places*, the rows of some shards' placement tables that contain its name.

    Attributes:
        cuts: tensor -> (table rows, kind) of each place; shards that share table rows share places.
        places: tensor -> row index of each place.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.tables: list[PlacementTable] = [as_table(shard.placements) for shard in shards]
        self.cuts: dict[str, list[Cut]] = defaultdict(list)
        self.places: dict[str, list[int]] = defaultdict(list)
        self._sharing: dict[TableRows, list[int]] = defaultdict(list)  # shards with these rows
        for shard, table in enumerate(self.tables):
            self._sharing[table.rows].append(shard)
        for rows in self._sharing:
            shared: dict[Hashable, Cut] = {}
            for place, (_, name, kind) in enumerate(rows):
                self.cuts[name].append(shared.setdefault(kind, (rows, kind)))
                self.places[name].append(place)

    def param(self, name: str, place: int) -> str:
        """Return the name of the parameter in place number `place` of tensor `name`."""
        rows, _ = self.cuts[name][place]
        return rows[self.places[name][place]][0]

    def list_rows(self, shard: int, names: Iterable[str]) -> list[Row]:
        """Return a shard's rows of the named tensors, in table order."""
        rows = self.tables[shard].rows
        found = sorted(
            row for name in names for (of, _), row in zip(self.cuts[name], self.places[name], strict=True) if of is rows
        )
        return [rows[row] for row in found]

    def list_boxes(self, cuts: Sequence[Cut]) -> Iterator[tuple[int, int, BoxPair]]:
        """Yield (shard, place number, boxes) for a tensor with these `cuts`, in shard order."""
        found = sorted((shard, place) for place, (rows, _) in enumerate(cuts) for shard in self._sharing[rows])
        for shard, place in found:
            yield shard, place, self.tables[shard].boxes[cuts[place][1]]


def find_classes(source: TensorIndex, destination: TensorIndex) -> dict[str, TensorClass]:
    """Return the class of every source tensor, in source order."""
    classes: dict[tuple[tuple[Cut, ...], tuple[Cut, ...]], TensorClass] = {}
    found: dict[str, TensorClass] = {}
    for name, cuts in source.cuts.items():
        key = tuple(cuts), tuple(destination.cuts.get(name, ()))
        if key not in classes:
            pieces: dict[Box, BoxPiece] = {}  # replicas are one piece with several holders
            for shard, place, (local_box, hf_box) in source.list_boxes(key[0]):
                if hf_box in pieces or box_volume(hf_box):
                    pieces.setdefault(hf_box, BoxPiece(hf_box, {})).holders.setdefault(shard, (place, local_box))
            targets: dict[Box, list[int]] = defaultdict(list)
            for shard, _, (_, hf_box) in destination.list_boxes(key[1]):
                targets[hf_box].append(shard)
            classes[key] = TensorClass(list(pieces.values()), targets)
        classes[key].names.append(name)
        found[name] = classes[key]
    return found
