# SPDX-License-Identifier: Apache-2.0
"""Which replica of a piece sends it to which rank: near before far, and every replica the same share.

All pieces with the same owners and the same demanding ranks share one `SourceChoice`. A demanding rank
is, in this order, served by itself if it is an owner; by an owner of its node; by any owner. Where the
demanding ranks divide evenly over the owners, each of them has one source for all of these pieces, so
that it talks to few peers. The ranks that are left over have no fixed source: piece by piece, largest
first, they take from the owners that have sent the least.

Invariant: pure and a function of its arguments only, so that both ends of a transfer compute it alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import chain, cycle
from typing import TypeVar

_Piece = TypeVar("_Piece", bound=Hashable)


@dataclass(slots=True)
class SourceChoice:
    """The source of every demanding rank.

    Attributes:
        owners: ranks that hold the pieces, ascending.
        fixed: demanding rank -> its source for every piece.
        leftover: ranks without a fixed source and the owners that may serve them; fewer ranks than owners.
        load: pieces that each owner sends to ranks with a fixed source.
    """

    owners: tuple[int, ...]
    fixed: dict[int, int] = field(default_factory=dict)
    leftover: list[tuple[list[int], tuple[int, ...]]] = field(default_factory=list)
    load: dict[int, int] = field(default_factory=dict)

    def spread_leftover(self, volumes: Mapping[_Piece, int], turn: int) -> dict[_Piece, dict[int, int]]:
        """Sources of the leftover ranks for each piece.

        Args:
            volumes: piece -> elements.
            turn: where to begin among owners that have sent the same; lets different choices begin differently.

        Returns:
            piece -> (demanding rank -> source).
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
    """Choose for all demanding ranks; both sequences ascend.

    Args:
        owners: ranks that hold the pieces; at least one.
        demanding: ranks that need a part of every one of them.
        ranks_per_node: consecutive ranks that share a node.
    """
    if len(owners) == 1:
        return SourceChoice(tuple(owners), dict.fromkeys(demanding, owners[0]))
    choice = SourceChoice(tuple(owners), load=dict.fromkeys(owners, 0))
    far = _serve_near(choice, demanding, ranks_per_node)
    _serve_far(choice, far)
    if len(set(choice.load.values())) == 1:  # equal loads do not change who has sent the least
        return replace(choice, load={})
    return choice


def _serve_near(choice: SourceChoice, demanding: Sequence[int], ranks_per_node: int) -> list[int]:
    """Serve the ranks whose node has an owner; returns the others."""
    by_node: dict[int, list[int]] = {}
    for owner in choice.owners:
        by_node.setdefault(owner // ranks_per_node, []).append(owner)
    far: list[int] = []
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
    far += demanding[done:]
    return far


def _serve_far(choice: SourceChoice, far: list[int]) -> None:
    """Serve ranks without an owner on their node: first level the owners' loads, then in turn."""
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
