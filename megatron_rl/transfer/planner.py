# SPDX-License-Identifier: Apache-2.0
"""Plan of a weight transfer between two layouts: the intersection of two lists of boxes.

Pure and deterministic: each rank computes its own part from the same lists of `Shard`s, once per class of tensors that
are sharded alike (`classes.py`).

Invariants (asserted in tests/transfer/test_planner.py): every placed destination element is written exactly once; every
element is read from a rank that holds it, near before far, with equal load on replicas; both ends of a pair list the
same operations in the order of the destination's placements.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import nsmallest
from itertools import chain, cycle
from operator import itemgetter
from typing import TypeVar

from megatron_rl.weights.placement_tables import BoxPair, PlacementTable, Row, TableRows, as_table
from megatron_rl.weights.shard_box import Box, ShardBox, box_volume, find_overlap, intersect, localize

Cut = tuple[TableRows, Hashable]  # rows of the table, kind


@dataclass(frozen=True)
class Shard:
    """Ranks, ascending, that hold the same placements."""

    ranks: tuple[int, ...]
    placements: Sequence[ShardBox]


@dataclass(slots=True, eq=False)
class BoxPiece:
    """A box that source shards hold, the same in every tensor of a class."""

    box: Box
    holders: dict[int, tuple[int, Box]]  # index of a source shard -> (place, see `TensorIndex`; box in the parameter)


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


_Piece = TypeVar("_Piece", bound=Hashable)


@dataclass(slots=True)
class SourceChoice:
    """Source rank of every rank that needs some pieces, chosen among the ranks that own them."""

    owners: tuple[int, ...]  # ascending
    fixed: dict[int, int] = field(default_factory=dict)  # needing rank -> its source for every piece
    # (needing ranks, candidate owners), fewer ranks than owners; the source depends on the piece.
    leftover: list[tuple[list[int], tuple[int, ...]]] = field(default_factory=list)
    # Owner -> number of ranks with this fixed source; empty if all are equal.
    load: dict[int, int] = field(default_factory=dict)

    def spread_leftover(self, volumes: Mapping[_Piece, int], turn: int) -> dict[_Piece, dict[int, int]]:
        """Choose the sources of `leftover` so that owners send equally much: piece -> (needing rank -> source).

        Args:
            volumes: piece -> elements.
            turn: offset that breaks ties between owners.
        """
        sent = dict.fromkeys(self.owners, 0)
        place = {owner: (index - turn) % len(self.owners) for index, owner in enumerate(self.owners)}
        sources: dict[_Piece, dict[int, int]] = {}
        for piece, volume in sorted(volumes.items(), key=lambda item: -item[1]):
            for owner, pieces in self.load.items():
                sent[owner] += pieces * volume
            chosen = sources[piece] = {}
            for ranks, candidates in self.leftover:
                least = nsmallest(len(ranks), candidates, key=lambda owner: (sent[owner], place[owner]))
                for rank, owner in zip(ranks, least, strict=True):
                    chosen[rank] = owner
                    sent[owner] += volume
        return sources


def choose_sources(owners: Sequence[int], demanding: Sequence[int], ranks_per_node: int) -> SourceChoice:
    """Choose the source of every demanding rank.

    Args:
        owners: ascending ranks that hold the pieces; at least one.
        demanding: ascending ranks that need a part of every piece.
    """
    if len(owners) == 1:
        return SourceChoice(tuple(owners), dict.fromkeys(demanding, owners[0]))
    choice = SourceChoice(tuple(owners), load=dict.fromkeys(owners, 0))
    by_node: dict[int, list[int]] = {}
    for owner in owners:
        by_node.setdefault(owner // ranks_per_node, []).append(owner)
    far: list[int] = []  # ranks without an owner on their node
    done = 0
    for node, local in by_node.items():
        start = bisect_left(demanding, node * ranks_per_node, done)
        stop = bisect_left(demanding, (node + 1) * ranks_per_node, start)
        far += demanding[done:start]
        done = stop
        themselves = set(local)
        choice.fixed.update({rank: rank for rank in demanding[start:stop] if rank in themselves})
        near = [rank for rank in demanding[start:stop] if rank not in themselves]
        even = len(near) - len(near) % len(local)
        _assign(choice, near[:even], cycle(local))
        if near[even:]:
            choice.leftover.append((near[even:], tuple(local)))
    _serve_far(choice, [*far, *demanding[done:]])
    if len(set(choice.load.values())) == 1:  # equal loads do not change the ranking
        return replace(choice, load={})
    return choice


def _serve_far(choice: SourceChoice, far: list[int]) -> None:
    """Choose an owner for each rank without one on its node: the least loaded owners first, then round robin."""
    level, top = min(choice.load.values()), max(choice.load.values())
    levelling: list[int] = []
    while level < top:
        below = [owner for owner in choice.owners if choice.load[owner] <= level]
        if len(levelling) + len(below) > len(far):
            break
        levelling += below
        level += 1
    even = len(levelling)
    if level == top:
        even = len(far) - (len(far) - even) % len(choice.owners)
    _assign(choice, far[:even], chain(levelling, cycle(choice.owners)))
    if far[even:]:
        choice.leftover.append((far[even:], choice.owners))


def _assign(choice: SourceChoice, ranks: Sequence[int], owners: chain[int] | cycle[int]) -> None:
    for rank, owner in zip(ranks, owners):
        choice.fixed[rank] = owner
        choice.load[owner] += 1


@dataclass(frozen=True, slots=True)
class TransferOp:
    """One copy: `dst_param[dst_box]` on `dst_rank` becomes `src_param[src_box]` of `src_rank`."""

    hf_name: str
    src_rank: int
    src_param: str
    src_box: Box
    dst_rank: int
    dst_param: str
    dst_box: Box

    @property
    def num_elements(self) -> int:
        """Elements of the piece."""
        return box_volume(self.dst_box)


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a plan."""

    rank: int
    local: tuple[TransferOp, ...]  # copies inside the rank
    receives: dict[int, tuple[TransferOp, ...]]  # source rank -> pieces, in plan order
    sends: dict[int, tuple[TransferOp, ...]]  # destination rank -> pieces, in the receiver's order


_Part = tuple[BoxPiece, Box, Box]  # a source piece, its overlap with a destination box, and that in the parameter
_Spread = dict[tuple[str, BoxPiece], dict[int, int]]  # piece of a tensor -> leftover rank -> its source


@dataclass(slots=True, eq=False)
class _Route:
    """Pieces that the same shards hold and the same destination shards need; one choice of sources serves all."""

    holders: tuple[int, ...]
    destinations: tuple[int, ...]
    turn: int
    pieces: list[tuple[TensorClass, BoxPiece]]


def group_shards(
    placements_of: Callable[[int], Iterable[ShardBox]], key_of: Callable[[int], Hashable], ranks: Iterable[int]
) -> list[Shard]:
    """Group ranks with equal keys into shards, sorted by first rank.

    Args:
        placements_of: returns the table of a rank; called once per shard.
        key_of: equal for ranks that hold the same placements.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for rank in ranks:
        members[key_of(rank)].append(rank)
    return [Shard(tuple(found), as_table(placements_of(found[0]))) for found in members.values()]


class Planner:
    """Index of a pair of layouts that yields any rank's plan.

    Args:
        source, destination: shards before and after the move; other ranks hold nothing.
        ranks_per_node: consecutive ranks on a node.
    """

    def __init__(self, source: Sequence[Shard], destination: Sequence[Shard], *, ranks_per_node: int) -> None:
        self._source, self._destination = source, destination
        self._ranks_per_node = ranks_per_node
        self._source_of, self._destination_of = _shard_of_rank(source), _shard_of_rank(destination)
        self._intersect = cache(intersect)  # a model has few distinct pairs of boxes
        self._held, self._wanted = TensorIndex(source), TensorIndex(destination)
        self._classes = find_classes(self._held, self._wanted)
        self._ordinals = {name: number for number, name in enumerate(self._classes)}
        self._routes: dict[BoxPiece, _Route] = {}  # pieces without a destination have none
        self._choose = cache(self._make_choice)  # only for routes that `plan` needs
        routes: dict[tuple[tuple[int, ...], tuple[int, ...]], _Route] = {}
        for tensors in dict.fromkeys(self._classes.values()):
            for piece in tensors.pieces:
                needing = (shards for box, shards in tensors.targets.items() if self._intersect(piece.box, box))
                if needed := tuple(sorted(set(chain.from_iterable(needing)))):
                    holders = tuple(piece.holders)
                    route = routes.setdefault((holders, needed), _Route(holders, needed, len(routes), []))
                    route.pieces.append((tensors, piece))
                    self._routes[piece] = route

    def plan(self, rank: int) -> RankPlan:
        """Plan the copies, receives and sends of one rank.

        Raises:
            ValueError: no source, or two different source boxes, hold an element of the rank's destination; names the
                tensor and the box.
        """
        local: list[TransferOp] = []
        receives: dict[int, list[TransferOp]] = defaultdict(list)
        for op in self._incoming(rank):
            (local if op.src_rank == rank else receives[op.src_rank]).append(op)
        sends: dict[int, list[TransferOp]] = defaultdict(list)
        for op in self._outgoing(rank):
            sends[op.dst_rank].append(op)
        return RankPlan(rank, tuple(local), _freeze(receives), _freeze(sends))

    def _incoming(self, rank: int) -> Iterator[TransferOp]:
        if rank not in self._destination_of:
            return
        table = self._wanted.tables[self._destination_of[rank]]
        known: dict[tuple[TensorClass | None, Hashable], list[_Part]] = {}
        for param, name, kind in table.rows:
            tensors = self._classes.get(name)
            if (tensors, kind) not in known:
                boxes = table.boxes[kind]
                parts = ((piece, self._intersect(piece.box, boxes[1])) for piece in (tensors.pieces if tensors else ()))
                found = [(piece, box, localize(box, boxes)) for piece, box in parts if box is not None]
                _check_cover([box for _, box, _ in found], boxes[1], name, f"rank {rank} parameter {param}")
                known[tensors, kind] = found
            for part in known[tensors, kind]:
                choice, leftover = self._choose(self._routes[part[0]])
                source = choice.fixed[rank] if rank in choice.fixed else leftover[name, part[0]][rank]
                yield self._make_op(name, part, source, rank, param)

    def _outgoing(self, rank: int) -> Iterator[TransferOp]:
        if rank not in self._source_of:
            return
        mine = self._serve(rank)
        for index in sorted({index for served in mine.values() for _, ranks in served for index in ranks}):
            table = self._wanted.tables[index]
            for param, name, kind in self._wanted.list_rows(index, mine):
                for piece, ranks in mine[name]:
                    box = self._intersect(piece.box, table.boxes[kind][1]) if index in ranks else None
                    if box is not None:
                        part = piece, box, localize(box, table.boxes[kind])
                        first = self._make_op(name, part, rank, ranks[index][0], param)
                        yield first
                        for other in ranks[index][1:]:
                            yield replace(first, dst_rank=other)

    def _serve(self, rank: int) -> dict[str, list[tuple[BoxPiece, dict[int, list[int]]]]]:
        """Return, per tensor, the pieces that this rank sends, each with its receivers: destination shard -> ranks."""
        shard = self._source_of[rank]
        fixed_of: dict[_Route, dict[int, list[int]]] = {}
        mine: dict[str, list[tuple[BoxPiece, dict[int, list[int]]]]] = {}
        for name in dict.fromkeys(name for _, name, _ in self._held.tables[shard].rows):
            for piece in self._classes[name].pieces:
                route = self._routes.get(piece)
                if route is None or shard not in piece.holders:
                    continue
                choice, leftover = self._choose(route)
                if route not in fixed_of:
                    fixed_of[route] = self._by_shard(choice.fixed, rank)
                ranks = fixed_of[route]
                if leftover:
                    ranks = self._by_shard(choice.fixed | leftover[name, piece], rank)
                mine.setdefault(name, []).append((piece, ranks))
        return mine

    def _by_shard(self, sources: dict[int, int], rank: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for other, source in sources.items():
            if source == rank != other:
                found.setdefault(self._destination_of[other], []).append(other)
        return found

    def _make_op(self, name: str, part: _Part, source: int, rank: int, param: str) -> TransferOp:
        piece, box, dst_box = part
        place, local_box = piece.holders[self._source_of[source]]
        src_box = localize(box, (local_box, piece.box))
        return TransferOp(name, source, self._held.param(name, place), src_box, rank, param, dst_box)

    def _make_choice(self, route: _Route) -> tuple[SourceChoice, _Spread]:
        owners = _merge_ranks(self._source, route.holders)
        choice = choose_sources(owners, _merge_ranks(self._destination, route.destinations), self._ranks_per_node)
        if not choice.leftover:
            return choice, {}
        pieces = [
            (self._ordinals[name], number, name, piece)
            for number, (tensors, piece) in enumerate(route.pieces)
            for name in tensors.names
        ]
        volumes = {(name, piece): box_volume(piece.box) for _, _, name, piece in sorted(pieces, key=itemgetter(0, 1))}
        return choice, choice.spread_leftover(volumes, route.turn)


def _check_cover(parts: Sequence[Box], target: Box, name: str, where: str) -> None:
    overlap, covered = find_overlap(parts), sum(map(box_volume, parts))
    if overlap is not None:
        raise ValueError(f"{name}{list(target)} for {where}: two different source boxes place its {list(overlap)}")
    if covered != box_volume(target):
        raise ValueError(
            f"{name}{list(target)} for {where}: the source places {covered} of its {box_volume(target)} elements"
        )


def _shard_of_rank(shards: Sequence[Shard]) -> dict[int, int]:
    shard_of: dict[int, int] = {}
    for index, shard in enumerate(shards):
        for rank in shard.ranks:
            if shard_of.setdefault(rank, index) != index:
                raise ValueError(f"rank {rank} is in two shards, {shard_of[rank]} and {index}")
    return shard_of


def _merge_ranks(shards: Sequence[Shard], indices: Sequence[int]) -> list[int]:
    return sorted(rank for index in indices for rank in shards[index].ranks)


def _freeze(ops: dict[int, list[TransferOp]]) -> dict[int, tuple[TransferOp, ...]]:
    return {peer: tuple(ops[peer]) for peer in sorted(ops)}
