# SPDX-License-Identifier: Apache-2.0
"""Values of sequences on their way from the ranks that hold them to those that need them.

The plan is a pure function of who holds and who needs, which every rank knows from the headers: each rank works out
its own part, and both sides of a transfer list its sequences in the same order. What lies on the rank already is not
sent. Executing a plan is one all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.parallel.collectives import current_device, exchange_bytes

Read = Callable[[str, np.ndarray], torch.Tensor]  # (column, sequences held here) -> their values, one after another


@dataclass(frozen=True)
class Holders:
    """Which ranks have, or need, the values of each sequence: all ranks of a replica.

    Attributes:
        replica_of: [n] index of the replica; -1: none.
        ranks: [num_replicas, width] global ranks; a rank is in at most one replica.
    """

    replica_of: np.ndarray
    ranks: np.ndarray

    def locate(self, rank: int) -> tuple[int, int]:
        """Replica of a rank and its place there; (-2, 0) if it is in none."""
        found = np.argwhere(self.ranks == rank)
        assert len(found) <= 1, "a rank is in one replica"
        return (int(found[0, 0]), int(found[0, 1])) if len(found) else (-2, 0)


def for_readers(is_wanted: np.ndarray, ranks: Sequence[int]) -> Holders:
    """Each of some ranks needs the sequences [n] that are wanted."""
    return Holders(np.where(is_wanted, 0, -1), np.array([ranks]))


@dataclass(frozen=True)
class FetchPlan:
    """What one rank does; sequences by their index in the step.

    Attributes:
        kept: needed, and here already.
        sends, receives: by the other rank, ascending; sequences ascending.
    """

    kept: np.ndarray
    sends: dict[int, np.ndarray]
    receives: dict[int, np.ndarray]

    @property
    def sequences(self) -> np.ndarray:
        """All that the rank has afterwards, in the order in which `fetch` returns their values."""
        return np.concatenate([self.kept, *self.receives.values()])


def plan_fetch(rank: int, source: Holders, destination: Holders) -> FetchPlan:
    """What `rank` sends and receives so that the destination has what it needs.

    A rank that needs a sequence takes it from one rank of the replica that holds it: which one follows from its place
    in its own replica and from the sequence, so that the replica's ranks share the work.
    """
    (source_replica, source_place), (replica, place) = source.locate(rank), destination.locate(rank)
    width = source.ranks.shape[1]
    needed = np.flatnonzero(destination.replica_of == replica)
    is_here = source.replica_of[needed] == source_replica
    wanted = needed[~is_here]
    givers = source.ranks[source.replica_of[wanted], (place + wanted) % width]
    held = np.flatnonzero((source.replica_of == source_replica) & (destination.replica_of >= 0))
    takers = destination.ranks[destination.replica_of[held]]  # [len(held), width of the destination]
    is_mine = (np.arange(takers.shape[1]) + held[:, None]) % width == source_place
    if source_replica >= 0:
        is_mine &= ~np.isin(takers, source.ranks[source_replica])
    rows, _ = np.nonzero(is_mine)
    return FetchPlan(needed[is_here], _by_rank(takers[is_mine], held[rows]), _by_rank(givers, wanted))


def _by_rank(ranks: np.ndarray, sequences: np.ndarray) -> dict[int, np.ndarray]:
    order = np.argsort(ranks, kind="stable")
    peers, starts = np.unique(ranks[order], return_index=True)
    return dict(zip(peers.tolist(), np.split(sequences[order], starts[1:]), strict=True)) if len(peers) else {}


@dataclass(frozen=True)
class Fetched:
    """What came of a plan on one rank.

    Attributes:
        sequences: [k], whose values these are.
        columns: name -> values of sequence after sequence, on the device of the job's ranks.
        num_bytes: received from other ranks.
    """

    sequences: np.ndarray
    columns: dict[str, torch.Tensor]
    num_bytes: int


def fetch(
    plan: FetchPlan, lengths: np.ndarray, columns: Mapping[str, torch.dtype], read: Read, group: dist.ProcessGroup
) -> Fetched:
    """Execute a plan; collective over `group`, which has the plan's ranks.

    Args:
        plan: of this rank.
        lengths: [n] values of each sequence, in every column.
        columns: what is fetched.
        read: looks up what this rank holds.
        group: all ranks of the job.
    """
    device = current_device()
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    counts = {peer: int(lengths[sequences].sum()) for peer, sequences in plan.receives.items()}
    width = sum(dtype.itemsize for dtype in columns.values())
    pieces = [nothing] * group.size()
    for peer, sequences in plan.sends.items():
        pieces[peer] = torch.cat([_as_bytes(read(name, sequences), device) for name in columns])
    sizes = [counts.get(peer, 0) * width for peer in range(group.size())]
    arrived = exchange_bytes(pieces, sizes, group)
    parts = {name: [_as_bytes(read(name, plan.kept), device)] for name in columns}
    for peer, count in counts.items():
        split = arrived[peer].split([count * dtype.itemsize for dtype in columns.values()])
        for name, piece in zip(columns, split, strict=True):
            parts[name].append(piece)
    values = {name: torch.cat(parts[name]).view(dtype) for name, dtype in columns.items()}
    return Fetched(plan.sequences, values, sum(sizes))


def _as_bytes(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return values.to(device).contiguous().view(torch.uint8)
