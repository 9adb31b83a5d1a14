# SPDX-License-Identifier: Apache-2.0
"""Headers, one row of numbers per sequence of a step, equal on every rank; and the transfer of what ranks hold.

Every decision about a step is a pure function of its headers. Tokens and texts stay on the ranks that generated them.

A sequence is one branch (context window) of a rollout. Baselines, denominators and metrics count rollouts.

Values go in one all-to-all (`fetch`) from the ranks that hold them to the ranks that need them. Each rank computes its
own part of the plan, and both sides of a transfer list its sequences in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.parallel.collectives import current_device, exchange_bytes, gather_flat
from megatron_rl.rewards.answers import name_answer
from megatron_rl.types import FAILED, SERVICE_FAILURES, Branch, KeptSets, Rollout, RouteShape, has_reward

FINISH_REASONS = ("stop", "length", "turns", "timeout", "error")
_CUT = ("length", "turns")

HEADER = np.dtype(
    [
        ("prompt_id", np.int32),
        ("answer", np.uint64),  # hash of the answer; 0 if not requested
        ("prompt_routes", np.uint64),  # hash of the prompt's routes; 0 if there are none
        ("reward", np.float64),
        ("earlier_reward", np.float64),  # part of the reward earned before the last token of this sequence
        ("sample_index", np.int16),
        ("place", np.int16),  # see `branches.arrange_branches`
        ("num_shared", np.int32),  # likewise
        ("group", np.int32),  # index of the prompt in the step
        ("rollout", np.int32),  # index of the rollout in the step
        ("num_prompt_tokens", np.int32),
        ("num_tokens", np.int32),
        ("num_sampled", np.int32),  # trainable: without position 0, which nothing predicts
        ("holder", np.int32),  # replica that holds the tokens, see `Holders`
        ("first_version", np.int32),
        ("last_version", np.int32),
        ("finish_reason", np.int8),  # index in FINISH_REASONS
        ("in_loss", np.bool_),
        ("has_turn_rewards", np.bool_),
    ]
)


@dataclass(frozen=True)
class Headers:
    """Table of numbers, one row per sequence of a step; a group is the rollouts of one prompt."""

    rows: np.ndarray  # [n] of HEADER, sorted by group, sample and branch
    names: tuple[str, ...]  # names of the reward components, in reported order
    components: np.ndarray  # [n, len(names)] float64; NaN if the rollout does not report the component

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, field: str) -> np.ndarray:
        """Return one field of all sequences, [n]."""
        return np.ascontiguousarray(self.rows[field])

    @cached_property
    def num_loss_tokens(self) -> np.ndarray:
        """Tokens of each sequence that enter the loss, [n]."""
        return np.where(self.rows["in_loss"], self.rows["num_sampled"], 0)

    @cached_property
    def has_failed(self) -> np.ndarray:
        """Whether the episode of each sequence timed out or raised, [n] bool."""
        return np.isin(self.rows["finish_reason"], [FINISH_REASONS.index(reason) for reason in FAILED])

    @cached_property
    def has_reward(self) -> np.ndarray:
        """Whether the reward of each sequence is valid: neither its episode nor the reward service failed, [n]."""
        return ~self.has_failed & ~(self.component(SERVICE_FAILURES) > 0)

    @cached_property
    def num_response_tokens(self) -> np.ndarray:
        """Tokens after the prompt, [n]."""
        return self["num_tokens"] - self["num_prompt_tokens"]

    @cached_property
    def first_of_rollout(self) -> np.ndarray:
        """Index of the first sequence of each rollout, [num_rollouts]."""
        return np.unique(self.rows["rollout"], return_index=True)[1]

    @cached_property
    def rollouts(self) -> Headers:
        """One row per rollout: its first branch. All fields except token counts hold for the whole rollout."""
        return Headers(self.rows[self.first_of_rollout], self.names, self.components[self.first_of_rollout])

    @cached_property
    def group_sizes(self) -> np.ndarray:
        """Number of rollouts of each group, [num_groups]."""
        return np.bincount(self.rollouts.rows["group"])

    def sum_per_rollout(self, values: np.ndarray) -> np.ndarray:
        """Sum a value over the sequences of each rollout: [n] -> [num_rollouts]."""
        return np.add.reduceat(values, self.first_of_rollout)

    def split_rewarded(self, values: np.ndarray) -> list[np.ndarray]:
        """Split values of the rewarded rollouts by group: [num_rollouts] -> [num_groups][k]."""
        has_reward = self.rollouts.has_reward
        sizes = np.bincount(self.rollouts["group"][has_reward], minlength=len(self.group_sizes))
        return np.split(values[has_reward], np.cumsum(sizes)[:-1])

    def component(self, name: str) -> np.ndarray:
        """Return a reward component of all sequences, [n]; NaN if it is not reported."""
        if name not in self.names:
            return np.full(len(self), np.nan)
        return np.ascontiguousarray(self.components[:, self.names.index(name)])

    def reported(self, index: int) -> dict[str, float]:
        """Return the reported reward components of one sequence by name."""
        pairs = zip(self.names, self.components[index].tolist(), strict=True)
        return {name: value for name, value in pairs if not np.isnan(value)}

    def list_titles(self) -> list[str]:
        """Return the name of each sequence for messages."""
        pairs = zip(self.rows["prompt_id"].tolist(), self.rows["sample_index"].tolist(), strict=True)
        return [f"prompt_id {prompt}, sample {sample}" for prompt, sample in pairs]

    def rescore(self, rewards: np.ndarray, name: str, scores: np.ndarray) -> Headers:
        """Replace the rewards and append a reward component, both [num_rollouts]."""
        rows, rollout = self.rows.copy(), self.rows["rollout"]
        rows["reward"] = rewards[rollout]
        return Headers(rows, (*self.names, name), np.column_stack([self.components, scores[rollout]]))

    def select_groups(self, groups: Sequence[int]) -> tuple[Headers, np.ndarray]:
        """Return the given groups, renumbered, and the old index of each of their sequences, [k]."""
        bounds = np.searchsorted(self.rows["group"], [[group, group + 1] for group in groups]).reshape(-1, 2)
        order = np.concatenate([np.arange(*bound) for bound in bounds]) if len(bounds) else np.zeros(0, np.int64)
        rows = self.rows[order].copy()
        rows["group"] = np.repeat(np.arange(len(bounds)), bounds[:, 1] - bounds[:, 0])
        return Headers(_number_rollouts(rows), self.names, self.components[order]), order


def build_headers(
    rollouts: Iterable[tuple[int, Rollout]], *, holder: int, mask_truncated: bool = False, with_answers: bool = False
) -> Headers:
    """Build the headers of local rollouts.

    Args:
        rollouts: pairs (index of the prompt in the step, rollout).
        holder: replica that holds their tokens.
        mask_truncated: exclude truncated responses from the loss; unrewarded ones always are.
        with_answers: store the hash of each answer.
    """
    found, rows = list(rollouts), []
    for group, rollout in found:
        answer = hash_bytes(name_answer(rollout.response).encode("utf-8", "backslashreplace")) if with_answers else 0
        is_cut = mask_truncated and rollout.finish_reason in _CUT
        in_loss = has_reward(rollout.finish_reason, rollout.reward_components) and not is_cut
        reason = FINISH_REASONS.index(rollout.finish_reason)
        earlier = 0.0
        places = [0], [0]
        if len(rollout.branches) > 1:
            from megatron_rl.samples.branches import arrange_branches

            places = arrange_branches(rollout.branches)
        for branch, place, num_shared in zip(rollout.branches, *places, strict=True):
            rewards = np.zeros(1) if branch.rewards is None else branch.rewards
            before = earlier + float(rewards[:-1].sum(dtype=np.float64))
            earlier += float(rewards.sum(dtype=np.float64))
            versions = branch.versions[branch.sampled]
            first, last = (versions.min(), versions.max()) if len(versions) else (0, 0)
            rows.append(
                (
                    rollout.prompt.prompt_id,
                    answer,
                    0 if branch.routes is None else hash_bytes(branch.routes[: branch.num_prompt_tokens].tobytes()),
                    rollout.reward,
                    before,
                    rollout.sample_index,
                    place,
                    num_shared,
                    group,
                    0,
                    branch.num_prompt_tokens,
                    len(branch.tokens),
                    branch.num_loss_tokens,
                    holder,
                    first,
                    last,
                    reason,
                    in_loss,
                    branch.rewards is not None,
                )
            )
    names = merge_names(rollout.reward_components for _, rollout in found)
    table = [
        [rollout.reward_components.get(name, np.nan) for name in names]
        for _, rollout in found
        for _ in rollout.branches
    ]
    headers = Headers(np.array(rows, HEADER), names, np.array(table, np.float64).reshape(len(rows), len(names)))
    return _sort(headers)


def join_headers(parts: Sequence[Headers]) -> Headers:
    """Join the headers of several generations; group numbers continue from part to part."""
    names = merge_names(part.names for part in parts)
    rows, first = [], 0
    for part in parts:
        rows.append(part.rows.copy())
        rows[-1]["group"] += first
        first += len(part.group_sizes)
    components = [_components_by(names, part) for part in parts]
    return Headers(_number_rollouts(np.concatenate(rows)), names, np.concatenate(components))


def gather_headers(mine: Headers, group: dist.ProcessGroup) -> tuple[Headers, int]:
    """Gather the headers of all ranks, and count the bytes that this rank received; collective.

    Args:
        mine: whole rollouts; no other rank contributes them.
    """
    texts, received = gather_flat(np.frombuffer("\n".join(mine.names).encode(), np.uint8), group)
    names = merge_names(bytes(text).decode().split("\n") if len(text) else [] for text in texts)
    packed = np.zeros(len(mine), [("row", HEADER), ("components", np.float64, (len(names),))])
    packed["row"], packed["components"] = mine.rows, _components_by(names, mine)
    parts, more = gather_flat(packed.view(np.uint8), group)
    found = np.concatenate(parts).view(packed.dtype)
    return _sort(Headers(found["row"], names, found["components"].reshape(len(found), len(names)))), received + more


def merge_names(lists: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Merge lists of names without duplicates, keeping the order of each list unless they contradict."""
    merged: list[str] = []
    for names in lists:
        place = 0
        for name in names:
            if name not in merged:
                merged.insert(place, name)
            place = merged.index(name) + 1
    return tuple(merged)


def hash_bytes(data: bytes) -> int:
    """Hash an answer, expert routes or a state to 64 bits, so that equal contents are found."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _components_by(names: Sequence[str], headers: Headers) -> np.ndarray:
    return np.stack([headers.component(name) for name in names], axis=1) if names else np.zeros((len(headers), 0))


def _sort(headers: Headers) -> Headers:
    order = np.lexsort((headers.rows["sample_index"], headers.rows["group"]))  # stable: branches keep their order
    return Headers(_number_rollouts(headers.rows[order]), headers.names, headers.components[order])


def _number_rollouts(rows: np.ndarray) -> np.ndarray:
    """Write the rollout index into each of the sorted rows, in place."""
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (np.diff(rows["group"]) != 0) | (np.diff(rows["sample_index"]) != 0)
    rows["rollout"] = np.cumsum(is_first) - 1
    return rows


Read = Callable[[str, np.ndarray], torch.Tensor]  # (column, local sequences) -> concatenated values


@dataclass(frozen=True)
class Holders:
    """Assignment of sequences to the replicas (groups of ranks) that hold, or need, their values."""

    replica_of: np.ndarray  # [n] index of the replica; -1 if none
    ranks: np.ndarray  # [num_replicas, width] global ranks; a rank is in at most one replica

    def locate(self, rank: int) -> tuple[int, int]:
        """Return the replica of a rank and the rank's index in it; (-2, 0) if it is in none."""
        found = np.argwhere(self.ranks == rank)
        assert len(found) <= 1, "a rank is in one replica"
        return (int(found[0, 0]), int(found[0, 1])) if len(found) else (-2, 0)


@dataclass(frozen=True)
class FetchPlan:
    """Sequences (indices) whose values one rank keeps, sends and receives in a `fetch`."""

    kept: np.ndarray  # needed sequences that are already local
    # sends, receives: sequences by peer rank, both ascending.
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
_VERSIONS, _REWARDS = {"versions": torch.int32}, {"rewards": torch.float32}  # fetched only if needed, like:
_STATES = {"states": torch.int64}


@dataclass(frozen=True)
class Payload:
    """Branches generated on this rank, by sequence index, as the source of fetches."""

    branches: Mapping[int, Branch]
    ranks: np.ndarray  # [num_replicas, width] ranks that hold the sequences of each replica
    num_bytes: int = 0  # received so far for this step
    has_kept: bool = False  # any token of the step was drawn by truncated sampling; equal on every rank
    route_shape: RouteShape | None = None  # equal on every rank; `None` without routes
    has_episodes: bool = True  # whether unsampled tokens separate turns; otherwise `engines/wrappers.py` inserted them
    has_states: bool = False  # whether states are fetched, see `Branch`


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
        fetch_from_first: uses only the first rank of each holder, which alone has turn rewards and states.
    """
    rows = headers.rows
    has_versions = bool((rows["first_version"] != rows["last_version"]).any())

    def read(name: str, sequences: np.ndarray) -> torch.Tensor:
        found = [(i, getattr(payload.branches[i], name)) for i in sequences.tolist()]
        zeros = np.zeros(max(lengths, default=0), np.int64 if name == "states" else np.float32)
        arrays = [zeros[: lengths[i]] if array is None else array for i, array in found]
        return torch.from_numpy(np.concatenate(arrays)) if arrays else torch.empty(0, dtype=dtypes[name])

    dtypes = _PAYLOAD | _VERSIONS | _REWARDS | _STATES
    lengths = headers["num_tokens"]
    found = fetch(lengths, _PAYLOAD | (_VERSIONS if has_versions else {}), read)
    kept = _fetch_kept(payload, lengths, fetch) if payload.has_kept else {}
    routes = _fetch_routes(payload, payload.route_shape, lengths, fetch) if payload.route_shape else {}
    columns = {name: split_values(values, found.sequences, lengths) for name, values in found.columns.items()}
    by_turn = (_REWARDS if rows["has_turn_rewards"].any() else {}) | (_STATES if payload.has_states else {})
    if by_turn:
        judged = fetch_from_first(lengths, by_turn, read)
        columns |= {name: split_values(judged.columns[name], judged.sequences, lengths) for name in by_turn}
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
            columns["states"][i] if payload.has_states else None,
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
