# SPDX-License-Identifier: Apache-2.0
"""Plan the move of weights between two layouts: the intersection of two lists of boxes.

Pure and deterministic: each rank computes its own part of the plan from the same placements, and nothing
is negotiated. Both sides are lists of `Shard`s, ranks that hold the same placements; what Megatron or vLLM
are is not known here. A *piece* is a distinct box of a logical tensor on the source side; all shards that
hold this box own it.

Invariants (asserted in tests/resharding/test_planner.py): every placed destination element is written
exactly once; every element is read from a rank that holds it, near before far (`replicas.py`); both ends of
a pair list the same operations in the same order, that of the destination's placements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_rl.resharding.replicas import SourceChoice, choose_sources
from megatron_rl.weights.shard_box import Box, ShardBox, box_volume, find_overlap, intersect, localize

_Targets = tuple[tuple[Box, tuple[int, ...]], ...]  # boxes of a tensor and the destination shards that place them


@dataclass(frozen=True, slots=True)
class TransferOp:
    """`dst_param[dst_box]` on `dst_rank` becomes `src_param[src_box]` of `src_rank`."""

    hf_name: str
    src_rank: int
    src_param: str
    src_box: Box
    dst_rank: int
    dst_param: str
    dst_box: Box

    @property
    def is_local(self) -> bool:
        """True if both ends are on one rank."""
        return self.src_rank == self.dst_rank

    @property
    def num_elements(self) -> int:
        """Size of the piece."""
        return box_volume(self.dst_box)


@dataclass(frozen=True)
class Shard:
    """Ranks that hold the same placements.

    Attributes:
        ranks: ascending.
        placements: what each of them holds.
    """

    ranks: tuple[int, ...]
    placements: tuple[ShardBox, ...]


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a plan.

    Attributes:
        rank: whose part.
        local: copies inside the rank.
        receives: source rank -> pieces, in plan order.
        sends: destination rank -> pieces, in the receiver's order.
    """

    rank: int
    local: tuple[TransferOp, ...]
    receives: dict[int, tuple[TransferOp, ...]]
    sends: dict[int, tuple[TransferOp, ...]]


@dataclass(slots=True, eq=False)
class _Piece:
    """A distinct box of a logical tensor on the source side, and where each source shard keeps it."""

    box: Box
    holders: dict[int, ShardBox]
    route: _Route | None = None  # None: nobody needs it


@dataclass(slots=True, eq=False)
class _Route:
    """All pieces with the same holders and the same destination shards."""

    holders: tuple[int, ...]
    destinations: tuple[int, ...]
    turn: int
    pieces: list[_Piece]
    choice: SourceChoice | None = None
    leftover: dict[_Piece, dict[int, int]] = field(default_factory=dict)


def group_shards(
    placements_of: Callable[[int], Sequence[ShardBox]], key_of: Callable[[int], Hashable], num_ranks: int
) -> list[Shard]:
    """Group the ranks of a layout.

    Args:
        placements_of: the table of a rank; called once per shard.
        key_of: equal for ranks that hold the same placements (the tp and pp coordinates, say).
        num_ranks: ranks 0 to num_ranks - 1 are grouped.

    Returns:
        Shards in the order of their first ranks.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for rank in range(num_ranks):
        members[key_of(rank)].append(rank)
    return [Shard(tuple(ranks), tuple(placements_of(ranks[0]))) for ranks in members.values()]


def plan_rank(
    rank: int, source: Sequence[Shard], destination: Sequence[Shard], *, ranks_per_node: int
) -> RankPlan:
    """Plan what one rank copies, receives and sends.

    Args:
        rank: whose part.
        source: shards before the move; ranks in no shard hold nothing.
        destination: shards after it.
        ranks_per_node: consecutive ranks that share a node.

    Raises:
        ValueError: a piece of the rank's destination that no source holds, or that two different source
            boxes hold in part (it would be written twice); the message names the tensor and the box.
    """
    return Planner(source, destination, ranks_per_node=ranks_per_node).plan(rank)


def plan_all(
    source: Sequence[Shard], destination: Sequence[Shard], *, num_ranks: int, ranks_per_node: int
) -> list[RankPlan]:
    """Plan every rank, for tests and small jobs; see `plan_rank`."""
    planner = Planner(source, destination, ranks_per_node=ranks_per_node)
    return [planner.plan(rank) for rank in range(num_ranks)]


class Planner:
    """The index of one pair of layouts, from which any rank's plan can be read; see `plan_rank`."""

    def __init__(self, source: Sequence[Shard], destination: Sequence[Shard], *, ranks_per_node: int) -> None:
        self._source, self._destination = source, destination
        self._ranks_per_node = ranks_per_node
        self._source_of, self._destination_of = _shard_of_rank(source), _shard_of_rank(destination)
        self._parts: dict[tuple[Box, Box], Box | None] = {}  # a model has few distinct pairs of boxes
        self._covered: set[tuple[Box, tuple[Box, ...]]] = set()
        self._demanding: dict[tuple[int, ...], list[int]] = {}
        self._elements: dict[tuple[Box, _Targets], dict[int, int]] = {}
        self._pieces, self._targets = _index_pieces(source), _index_targets(destination)
        self._routes = self._index_routes()

    def plan(self, rank: int) -> RankPlan:
        """One rank's part of the plan; raises as `plan_rank` does."""
        local: list[TransferOp] = []
        receives: dict[int, list[TransferOp]] = defaultdict(list)
        for op in self._incoming(rank):
            (local if op.is_local else receives[op.src_rank]).append(op)
        sends: dict[int, list[TransferOp]] = defaultdict(list)
        for op in self._outgoing(rank):
            sends[op.dst_rank].append(op)
        return RankPlan(rank, tuple(local), _freeze(receives), _freeze(sends))

    def flows(self) -> Iterator[tuple[int, int, int]]:
        """Source rank, destination rank and elements, for all ranks, without making operations.

        A pair may come several times; equal ranks are copies inside the rank. Coverage is not checked.
        """
        for route in self._routes:
            choice, leftover = self._choose(route)
            total: dict[int, int] = defaultdict(int)
            for piece in route.pieces:
                for index, elements in self._demand(piece).items():
                    total[index] += elements
                    for rank, source in leftover.get(piece, {}).items():
                        if self._destination_of[rank] == index:
                            yield source, rank, elements
            for rank, source in choice.fixed.items():
                yield source, rank, total[self._destination_of[rank]]

    def _incoming(self, rank: int) -> Iterator[TransferOp]:
        """Operations that fill this rank, in plan order."""
        if rank not in self._destination_of:
            return
        for target in self._destination[self._destination_of[rank]].placements:
            parts: list[Box] = []
            for piece in self._pieces.get(target.hf_name, ()):
                part = self._intersect(piece.box, target.hf_box)
                if part is not None:
                    parts.append(part)
                    yield self._make_op(piece, self._find_source(piece, rank), target, part, rank)
            self._check_cover(tuple(parts), target, rank)

    def _outgoing(self, rank: int) -> Iterator[TransferOp]:
        """Operations that this rank serves to others, in plan order for each of them."""
        if rank not in self._source_of:
            return
        mine = self._serve(rank)
        wanted = sorted({index for served in mine.values() for _, ranks in served for index in ranks})
        for index in wanted:
            for target in self._destination[index].placements:
                for piece, ranks in mine.get(target.hf_name, ()):
                    part = self._intersect(piece.box, target.hf_box) if index in ranks else None
                    if part is not None:
                        first = self._make_op(piece, rank, target, part, ranks[index][0])
                        yield first
                        for other in ranks[index][1:]:
                            yield TransferOp(first.hf_name, rank, first.src_param, first.src_box,
                                             other, first.dst_param, first.dst_box)

    def _serve(self, rank: int) -> dict[str, list[tuple[_Piece, dict[int, list[int]]]]]:
        """Tensor name -> pieces that this rank sends, each with destination shard -> ranks."""
        shard = self._source_of[rank]
        fixed_of: dict[int, dict[int, list[int]]] = {}
        mine: dict[str, list[tuple[_Piece, dict[int, list[int]]]]] = {}
        for name in dict.fromkeys(placement.hf_name for placement in self._source[shard].placements):
            for piece in self._pieces.get(name, ()):
                route = piece.route
                if route is None or shard not in piece.holders:
                    continue
                choice, leftover = self._choose(route)
                if route.turn not in fixed_of:
                    fixed_of[route.turn] = self._by_shard(choice.fixed, rank)
                ranks = fixed_of[route.turn]
                if leftover:
                    ranks = self._by_shard(choice.fixed | leftover[piece], rank)
                mine.setdefault(name, []).append((piece, ranks))
        return mine

    def _by_shard(self, sources: dict[int, int], rank: int) -> dict[int, list[int]]:
        """Destination shard -> other ranks whose source is `rank`."""
        found: dict[int, list[int]] = {}
        for other, source in sources.items():
            if source == rank != other:
                found.setdefault(self._destination_of[other], []).append(other)
        return found

    def _make_op(self, piece: _Piece, source: int, target: ShardBox, part: Box, rank: int) -> TransferOp:
        origin = piece.holders[self._source_of[source]]
        return TransferOp(target.hf_name, source, origin.param, localize(part, origin),
                          rank, target.param, localize(part, target))

    def _find_source(self, piece: _Piece, rank: int) -> int:
        assert piece.route is not None, "somebody needs the piece"
        choice, leftover = self._choose(piece.route)
        return choice.fixed[rank] if rank in choice.fixed else leftover[piece][rank]

    def _choose(self, route: _Route) -> tuple[SourceChoice, dict[_Piece, dict[int, int]]]:
        """Sources of a route, made when they are first asked for."""
        if route.choice is None:
            if route.destinations not in self._demanding:
                self._demanding[route.destinations] = _merge_ranks(self._destination, route.destinations)
            owners = _merge_ranks(self._source, route.holders)
            route.choice = choose_sources(owners, self._demanding[route.destinations], self._ranks_per_node)
            volumes = {piece: box_volume(piece.box) for piece in route.pieces}
            if route.choice.leftover:
                route.leftover = route.choice.spread_leftover(volumes, route.turn)
        return route.choice, route.leftover

    def _index_routes(self) -> list[_Route]:
        """Find who needs each piece, and join pieces with the same answer to routes."""
        routes: dict[tuple[tuple[int, ...], tuple[int, ...]], _Route] = {}
        known: dict[tuple[Box, _Targets], tuple[int, ...]] = {}
        for name, pieces in self._pieces.items():
            targets = self._targets.get(name, ())
            for piece in pieces:
                key = (piece.box, targets)
                if key not in known:
                    known[key] = tuple(sorted({
                        index for box, indices in targets if self._intersect(piece.box, box) for index in indices}))
                if known[key]:
                    holders = tuple(piece.holders)
                    route = routes.setdefault(
                        (holders, known[key]), _Route(holders, known[key], len(routes), []))
                    route.pieces.append(piece)
                    piece.route = route
        return list(routes.values())

    def _intersect(self, a: Box, b: Box) -> Box | None:
        if (a, b) not in self._parts:
            self._parts[a, b] = intersect(a, b)
        return self._parts[a, b]

    def _demand(self, piece: _Piece) -> dict[int, int]:
        """Destination shard -> elements of the piece that each of its ranks needs."""
        name = next(iter(piece.holders.values())).hf_name
        key = (piece.box, self._targets[name])
        if key not in self._elements:
            demand: dict[int, int] = defaultdict(int)
            for box, indices in self._targets[name]:
                part = self._intersect(piece.box, box)
                if part:
                    for index in indices:
                        demand[index] += box_volume(part)
            self._elements[key] = demand
        return self._elements[key]

    def _check_cover(self, parts: tuple[Box, ...], target: ShardBox, rank: int) -> None:
        """Raise unless the parts fill the target, each element once."""
        if (target.hf_box, parts) in self._covered:
            return
        where = f"{target.hf_name}{list(target.hf_box)} for rank {rank} parameter {target.param}"
        overlap, covered = find_overlap(parts), sum(map(box_volume, parts))
        if overlap is not None:
            raise ValueError(f"{where}: two different source boxes place its {list(overlap)}")
        if covered != box_volume(target.hf_box):
            raise ValueError(f"{where}: the source places {covered} of its {box_volume(target.hf_box)} elements")
        self._covered.add((target.hf_box, parts))


def _shard_of_rank(shards: Sequence[Shard]) -> dict[int, int]:
    """Rank -> index of its shard."""
    shard_of: dict[int, int] = {}
    for index, shard in enumerate(shards):
        for rank in shard.ranks:
            if shard_of.setdefault(rank, index) != index:
                raise ValueError(f"rank {rank} is in two shards, {shard_of[rank]} and {index}")
    return shard_of


def _merge_ranks(shards: Sequence[Shard], indices: Sequence[int]) -> list[int]:
    return sorted(rank for index in indices for rank in shards[index].ranks)


def _index_pieces(source: Sequence[Shard]) -> dict[str, list[_Piece]]:
    """Group equal boxes of a tensor: replicas are one piece with several holders."""
    pieces: dict[str, dict[Box, _Piece]] = defaultdict(dict)
    for index, shard in enumerate(source):
        for placement in shard.placements:
            boxes = pieces[placement.hf_name]
            if placement.hf_box not in boxes:
                if not box_volume(placement.hf_box):
                    continue
                boxes[placement.hf_box] = _Piece(placement.hf_box, {})
            boxes[placement.hf_box].holders.setdefault(index, placement)
    return {name: list(boxes.values()) for name, boxes in pieces.items()}


def _index_targets(destination: Sequence[Shard]) -> dict[str, _Targets]:
    """Name -> distinct boxes, each with the shards that place it (twice for one that places it twice)."""
    found: dict[str, dict[Box, list[int]]] = defaultdict(dict)
    for index, shard in enumerate(destination):
        for placement in shard.placements:
            found[placement.hf_name].setdefault(placement.hf_box, []).append(index)
    shared: dict[_Targets, _Targets] = {}
    targets: dict[str, _Targets] = {}
    for name, boxes in found.items():
        answer = tuple((box, tuple(indices)) for box, indices in boxes.items())
        targets[name] = shared.setdefault(answer, answer)
    return targets


def _freeze(ops: dict[int, list[TransferOp]]) -> dict[int, tuple[TransferOp, ...]]:
    return {peer: tuple(ops[peer]) for peer in sorted(ops)}
