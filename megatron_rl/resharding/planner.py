# SPDX-License-Identifier: Apache-2.0
"""Plan the move of weights between two layouts: the intersection of two lists of boxes.

Pure and deterministic: every rank computes the same plan from the same placements, and nothing is
negotiated. Both sides are lists of placements per rank; what Megatron or vLLM are is not known here.

Invariants (asserted in tests/resharding/test_planner.py): every placed destination element is written
exactly once; every element is read from a rank that holds it; a rank that holds a piece itself reads
it from itself; the load of replicas that hold the same piece differs by at most one piece's bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.weights.placement import Box, Placement, box_volume, find_overlap, intersect, localize


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
class ReshardPlan:
    """All transfers of one reshard, ordered by destination placement.

    Attributes:
        ops: the transfers of all ranks.
        num_ranks: ranks that take part.
    """

    ops: tuple[TransferOp, ...]
    num_ranks: int

    def local(self, rank: int) -> list[TransferOp]:
        """Copies inside `rank`."""
        return [op for op in self.ops if op.is_local and op.dst_rank == rank]

    def sends(self, rank: int) -> dict[int, list[TransferOp]]:
        """Destination rank -> pieces that `rank` sends there, in plan order."""
        return self._by_peer([op for op in self.ops if op.src_rank == rank and not op.is_local], "dst_rank")

    def receives(self, rank: int) -> dict[int, list[TransferOp]]:
        """Source rank -> pieces that `rank` receives from there, in plan order."""
        return self._by_peer([op for op in self.ops if op.dst_rank == rank and not op.is_local], "src_rank")

    @staticmethod
    def _by_peer(ops: list[TransferOp], side: str) -> dict[int, list[TransferOp]]:
        peers: dict[int, list[TransferOp]] = defaultdict(list)
        for op in ops:
            peers[getattr(op, side)].append(op)
        return dict(sorted(peers.items()))

    def max_peers(self) -> int:
        """Largest number of ranks that any rank sends to or receives from."""
        out: dict[int, set[int]] = defaultdict(set)
        into: dict[int, set[int]] = defaultdict(set)
        for op in self.ops:
            if not op.is_local:
                out[op.src_rank].add(op.dst_rank)
                into[op.dst_rank].add(op.src_rank)
        return max((len(peers) for peers in (*out.values(), *into.values())), default=0)

    def moved_elements(self) -> int:
        """Elements that cross between ranks."""
        return sum(op.num_elements for op in self.ops if not op.is_local)

    def kept_elements(self) -> int:
        """Elements that are copied inside a rank."""
        return sum(op.num_elements for op in self.ops if op.is_local)


@dataclass(slots=True)
class _Piece:
    """A distinct box of a logical tensor on the source side and the ranks that hold it."""

    hf_box: Box
    owners: dict[int, Placement]


def plan_reshard(
    source: Sequence[Sequence[Placement]], destination: Sequence[Sequence[Placement]], *, ranks_per_node: int
) -> ReshardPlan:
    """Plan the transfers that fill `destination` from `source`.

    A piece that several ranks hold is read from the destination itself if it is one of them, else from
    a rank of the same node, else from the one that has sent the least so far.

    Args:
        source: placements per rank.
        destination: placements per rank (of the same ranks).
        ranks_per_node: consecutive ranks that share a node.

    Raises:
        ValueError: a destination piece that no source holds, or that two different source boxes hold
            in part (it would be written twice); the message names the tensor and the box.
    """
    pieces = _index(source)
    sent = [0] * len(source)
    ops: list[TransferOp] = []
    for dst_rank, placements in enumerate(destination):
        for target in placements:
            if not box_volume(target.hf_box):
                continue
            parts: list[Box] = []
            for piece in pieces.get(target.hf_name, ()):
                part = intersect(piece.hf_box, target.hf_box)
                if part is None:
                    continue
                src_rank = _choose(piece.owners, dst_rank, sent, ranks_per_node)
                origin = piece.owners[src_rank]
                ops.append(TransferOp(
                    target.hf_name, src_rank, origin.param, localize(part, origin),
                    dst_rank, target.param, localize(part, target)))
                parts.append(part)
                if src_rank != dst_rank:
                    sent[src_rank] += box_volume(part)
            _check_cover(parts, target, dst_rank)
    return ReshardPlan(tuple(ops), len(source))


def _check_cover(parts: list[Box], target: Placement, dst_rank: int) -> None:
    """Raise unless the parts fill the target, each element once."""
    where = f"{target.hf_name}{list(target.hf_box)} for rank {dst_rank} parameter {target.param}"
    overlap, covered = find_overlap(parts), sum(map(box_volume, parts))
    if overlap is not None:
        raise ValueError(f"{where}: two different source boxes place its {list(overlap)}")
    if covered != box_volume(target.hf_box):
        raise ValueError(f"{where}: the source places {covered} of its {box_volume(target.hf_box)} elements")


def _index(source: Sequence[Sequence[Placement]]) -> dict[str, list[_Piece]]:
    """Group equal boxes of a tensor: replicas are one piece with several owners."""
    index: dict[str, dict[Box, _Piece]] = defaultdict(dict)
    for rank, placements in enumerate(source):
        for placement in placements:
            if box_volume(placement.hf_box):
                piece = index[placement.hf_name].setdefault(placement.hf_box, _Piece(placement.hf_box, {}))
                piece.owners.setdefault(rank, placement)
    return {name: list(boxes.values()) for name, boxes in index.items()}


def _choose(owners: dict[int, Placement], dst_rank: int, sent: list[int], ranks_per_node: int) -> int:
    if dst_rank in owners:
        return dst_rank
    node = dst_rank // ranks_per_node
    near = [rank for rank in owners if rank // ranks_per_node == node]
    return min(near or owners, key=lambda rank: (sent[rank], rank))
