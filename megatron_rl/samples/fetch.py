# SPDX-License-Identifier: Apache-2.0
"""Transfer of per-sequence values from the ranks that hold them to the ranks that need them, as one all-to-all.

The plan is a pure function of the headers: each rank computes its own part, and both sides of a transfer list its
sequences in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.parallel.collectives import current_device, exchange_bytes
from megatron_rl.samples.table import Headers
from megatron_rl.types import Branch, KeptSets, Rollout, RouteShape

Read = Callable[[str, np.ndarray], torch.Tensor]  # (column, local sequences) -> concatenated values


@dataclass(frozen=True)
class Holders:
    """Assignment of sequences to the replicas (groups of ranks) that hold, or need, their values.

    Attributes:
        replica_of: [n] index of the replica; -1 if none.
        ranks: [num_replicas, width] global ranks; a rank is in at most one replica.
    """

    replica_of: np.ndarray
    ranks: np.ndarray

    def locate(self, rank: int) -> tuple[int, int]:
        """Return the replica of a rank and the rank's index in it; (-2, 0) if it is in none."""
        found = np.argwhere(self.ranks == rank)
        assert len(found) <= 1, "a rank is in one replica"
        return (int(found[0, 0]), int(found[0, 1])) if len(found) else (-2, 0)


def for_readers(is_wanted: np.ndarray, ranks: Sequence[int]) -> Holders:
    """Return `Holders` of one replica whose ranks all need the sequences `is_wanted`, [n] bool."""
    return Holders(np.where(is_wanted, 0, -1), np.array([ranks]))


@dataclass(frozen=True)
class FetchPlan:
    """Sequences (indices) whose values one rank keeps, sends and receives in a `fetch`.

    Attributes:
        kept: needed sequences that are already local.
        sends, receives: sequences by peer rank, both ascending.
    """

    kept: np.ndarray
    sends: dict[int, np.ndarray]
    receives: dict[int, np.ndarray]

    @property
    def sequences(self) -> np.ndarray:
        """All sequences after the transfer, in the order of the values from `fetch`."""
        return np.concatenate([self.kept, *self.receives.values()])


def plan_fetch(rank: int, source: Holders, destination: Holders) -> FetchPlan:
    """Plan which sequences `rank` sends and receives; ranks of a replica hold the same ones and take turns sending."""
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
    """Sequences [k] that arrived on one rank, their concatenated values by column, and the bytes received."""

    sequences: np.ndarray
    columns: dict[str, torch.Tensor]
    num_bytes: int


def fetch(
    plan: FetchPlan, lengths: np.ndarray, columns: Mapping[str, torch.dtype], read: Read, group: dist.ProcessGroup
) -> Fetched:
    """Execute this rank's plan; collective.

    Args:
        lengths: [n] values per sequence and column.
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


# (lengths [n], columns, reader of local values) -> values that this rank needs; collective
Fetch = Callable[[np.ndarray, Mapping[str, torch.dtype], Read], Fetched]
_PAYLOAD = {"logprobs": torch.float32, "tokens": torch.int32, "sampled": torch.bool}
_VERSIONS, _REWARDS = {"versions": torch.int32}, {"rewards": torch.float32}  # fetched only if needed


@dataclass(frozen=True)
class Payload:
    """Branches generated on this rank, by sequence index, as the source of fetches.

    Attributes:
        ranks: [num_replicas, width] ranks that hold the sequences of each replica.
        num_bytes: received so far for this step.
        has_kept: any token of the step was drawn by truncated sampling; equal on every rank.
        route_shape: equal on every rank; `None` without routes.
        has_episodes: whether unsampled tokens separate turns; otherwise `engines/wrappers.py` inserted them.
    """

    branches: Mapping[int, Branch]
    ranks: np.ndarray
    num_bytes: int = 0
    has_kept: bool = False
    route_shape: RouteShape | None = None
    has_episodes: bool = True


def index_branches(held: Iterable[tuple[int, Rollout]], headers: Headers) -> dict[int, Branch]:
    """Return the branches of pairs (index of the prompt in the step, local rollout) by sequence index."""
    firsts = headers.rollouts.rows
    names = zip(firsts["group"].tolist(), firsts["sample_index"].tolist(), strict=True)
    starts = dict(zip(names, headers.first_of_rollout.tolist(), strict=True))
    return {
        starts[index, rollout.sample_index] + place: branch
        for index, rollout in held
        for place, branch in enumerate(rollout.branches)
    }


def fetch_branches(payload: Payload, headers: Headers, fetch: Fetch, fetch_from_first: Fetch) -> dict[int, Branch]:
    """Fetch the tokens of the sequences that this rank needs, by sequence index; collective.

    Args:
        fetch_from_first: uses only the first rank of each holder, which alone has turn rewards.
    """
    rows = headers.rows
    has_versions = bool((rows["first_version"] != rows["last_version"]).any())

    def read(name: str, sequences: np.ndarray) -> torch.Tensor:
        found = [(i, getattr(payload.branches[i], name)) for i in sequences.tolist()]
        arrays = [np.zeros(lengths[i], np.float32) if array is None else array for i, array in found]
        return torch.from_numpy(np.concatenate(arrays)) if arrays else torch.empty(0, dtype=dtypes[name])

    dtypes = _PAYLOAD | _VERSIONS | _REWARDS
    lengths = headers["num_tokens"]
    found = fetch(lengths, _PAYLOAD | (_VERSIONS if has_versions else {}), read)
    kept = _fetch_kept(payload, lengths, fetch) if payload.has_kept else {}
    routes = _fetch_routes(payload, payload.route_shape, lengths, fetch) if payload.route_shape else {}
    columns = {name: split_values(values, found.sequences, lengths) for name, values in found.columns.items()}
    if rows["has_turn_rewards"].any():
        judged = fetch_from_first(lengths, _REWARDS, read)
        columns["rewards"] = split_values(judged.columns["rewards"], judged.sequences, lengths)
    of_version = {v: np.broadcast_to(np.int32(v), max(lengths, default=0)) for v in {*rows["last_version"].tolist()}}
    return {
        i: Branch(
            columns["tokens"][i],
            columns["sampled"][i],
            columns["logprobs"][i],
            columns["versions"][i] if "versions" in columns else of_version[int(rows["last_version"][i])][: lengths[i]],
            int(rows["num_prompt_tokens"][i]),
            kept.get(i),
            columns["rewards"][i] if rows["has_turn_rewards"][i] else None,
            routes.get(i),
        )
        for i in found.sequences.tolist()
    }


def _fetch_kept(payload: Payload, lengths: np.ndarray, fetch: Fetch) -> dict[int, KeptSets]:
    def read(name: str, sequences: np.ndarray) -> torch.Tensor:
        branches = [payload.branches[i] for i in sequences.tolist()]
        sets = [branch.kept or KeptSets.whole(len(branch.tokens)) for branch in branches]
        found = np.concatenate([np.empty(0, np.int32), *(getattr(kept, name) for kept in sets)])
        return torch.from_numpy(found) if len(found) else torch.empty(0, dtype=torch.int32)

    found = fetch(lengths, {"counts": torch.int32}, read)
    counts = split_values(found.columns["counts"], found.sequences, lengths)
    sizes = np.zeros(len(lengths), np.int64)  # filled for local and incoming sequences
    for index, branch in payload.branches.items():
        sizes[index] = 0 if branch.kept is None else len(branch.kept.ids)
    for index, array in counts.items():
        sizes[index] = array.sum()
    found = fetch(sizes, {"ids": torch.int32}, read)
    ids = split_values(found.columns["ids"], found.sequences, sizes)
    return {index: KeptSets(ids[index], counts[index]) for index in counts}


def _fetch_routes(payload: Payload, shape: RouteShape, lengths: np.ndarray, fetch: Fetch) -> dict[int, np.ndarray]:
    def read(name: str, sequences: np.ndarray) -> torch.Tensor:
        branches = [payload.branches[i] for i in sequences.tolist()]
        found = [shape.unknown(len(b.tokens)) if b.routes is None else b.routes for b in branches]
        return torch.from_numpy(np.concatenate([shape.unknown(0), *found]).ravel())

    sizes = lengths * (shape.layers * shape.choices)
    found = fetch(sizes, {"routes": torch.from_numpy(shape.unknown(0)).dtype}, read)
    parts = split_values(found.columns["routes"], found.sequences, sizes)
    return {i: part.reshape(-1, shape.layers, shape.choices) for i, part in parts.items()}


def split_values(values: torch.Tensor, sequences: np.ndarray, lengths: np.ndarray) -> dict[int, np.ndarray]:
    """Split a fetched column into an array per sequence, by sequence index.

    Args:
        values: values of `sequences`, concatenated in that order.
        lengths: [n] number of values of every sequence of the step.
    """
    array, stops = values.cpu().numpy(), np.cumsum(lengths[sequences]).tolist()
    bounds = zip([0, *stops], stops, strict=False)
    return {i: array[start:stop] for i, (start, stop) in zip(sequences.tolist(), bounds, strict=True)}
