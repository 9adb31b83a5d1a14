# SPDX-License-Identifier: Apache-2.0
"""Scored sequences of a step (`Experience`).

Every rank has all headers. Tokens stay on the ranks that generated them, and roles fetch their share.

    samples.values = critic.compute_values(samples)     # a column in the critic's packing
    samples.read(actor's packer, ["values"])            # the actor fetches it into its own
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.parallel.collectives import reduce_scalars
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.samples.fetch import (
    Fetched,
    Holders,
    Payload,
    Read,
    fetch,
    fetch_branches,
    for_readers,
    index_branches,
    plan_fetch,
    split_values,
)
from megatron_rl.samples.pack import Packer, Packing
from megatron_rl.samples.table import FINISH_REASONS, Headers, build_headers, join_headers
from megatron_rl.types import Branch, Prompt, Rollout, RouteShape, Turn, UserError


@dataclass(frozen=True)
class Column:
    """Per-token result of a role: [t, ...] in the rows of `packing`, valid after the prompts.

    Attributes:
        holders: ranks with the values; `None` for all ranks of `packing`.
    """

    values: torch.Tensor
    packing: Packing
    holders: Holders | None = None


_PER_ROLLOUT = ("mismatch", "lessons", "kl_per_rollout")


class _Slot:
    """Descriptor of an `Experience` column that is set once; `None` before."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, samples: Experience, owner: type | None = None) -> Any:
        return samples.columns.get(self._name)

    def __set__(self, samples: Experience, value: Any) -> None:
        if self._name in samples.columns:
            raise UserError(
                f"samples.{self._name} is set already",
                source=f"samples.{self._name}",
                expected="one assignment per sample",
                hint="sample again: to run a cell of a notebook again, run the cell with policy.sample first",
            )
        if self._name not in _PER_ROLLOUT and isinstance(value, Sequence | float | np.ndarray | torch.Tensor):
            check_kind(value, Column, f"samples.{self._name}", "a column, such as policy.expand(samples, values)")
        if value is not None:
            samples.columns[self._name] = value


class Experience:
    """Scored sequences of a step: all headers, the tokens held on this rank, and columns (results of roles).

    Args:
        prompts: one per group.
        baselines: [num_groups] reward of the greedy response (ReMax), NaN if it failed.
        metrics: metrics of the rollout phase.

    Attributes:
        columns: by name, each set once.
        num_bytes: received by this rank for this step so far.
    """

    old_logprobs = _Slot()
    sum_pi_squared = _Slot()
    ref_logprobs = _Slot()
    values = _Slot()
    importance_weights = _Slot()
    mismatch = _Slot()
    advantages = _Slot()
    returns = _Slot()
    chosen = _Slot()
    lessons = _Slot()
    teacher_logprobs = _Slot()
    teacher_top_k = _Slot()
    teacher_hidden = _Slot()
    kl_per_rollout = _Slot()
    update_logprobs = _Slot()
    update_entropy = _Slot()
    replayed_routes = _Slot()

    def __init__(
        self,
        headers: Headers,
        prompts: Sequence[Prompt],
        payload: Payload,
        group: dist.ProcessGroup,
        *,
        baselines: np.ndarray | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        self.headers, self.prompts, self.baselines = headers, prompts, baselines
        self.metrics = dict(metrics or {})
        self.columns: dict[str, Any] = {}
        self._payload, self._group = payload, group
        self._holders = Holders(headers["holder"], payload.ranks)
        self.num_bytes = payload.num_bytes
        self._packings: dict[Hashable, Packing] = {}
        self._copies: dict[tuple[str, Hashable], torch.Tensor] = {}

    def __repr__(self) -> str:
        rewards, tokens = self.headers.rollouts["reward"], int(self.headers.num_response_tokens.sum())
        return (
            f"<{len(rewards)} samples of {len(self.prompts)} prompts: {tokens} response tokens, mean reward "
            f"{rewards.mean():.4g}; texts: fetch_rollouts; columns: {', '.join(self.columns) or 'none yet'}>"
        )

    def pack(self, packer: Packer) -> Packing:
        """Return the packing of a role; built by the first call, which is collective."""
        if packer.key not in self._packings:
            self._packings[packer.key] = packer.pack(self.headers, self._fetch_branches)
        return self._packings[packer.key]

    def read(self, packer: Packer, names: Sequence[str] = ()) -> TrainBatch:
        """Return a role's batch with the named columns that exist; collective if one must be fetched."""
        packing = self.pack(packer)
        columns = {name: self._bring(name, packing, packer.key) for name in names if name in self.columns}
        return replace(packing.batch, **columns)

    def fetch_rollouts(
        self,
        chosen: Sequence[int],
        decode: Callable[[list[int]], str],
        columns: Mapping[str, Column] | None = None,
        *,
        on_all: bool = False,
    ) -> list[tuple[Rollout, dict[str, np.ndarray]]]:
        """Fetch whole rollouts, with `columns` of their loss tokens, to rank 0 or all ranks; collective.

        Args:
            chosen: rollout indices, ascending.
            decode: response tokens -> text.
        """
        bounds = [*self.headers.first_of_rollout.tolist(), len(self.headers)]
        parts = [range(bounds[number], bounds[number + 1]) for number in chosen]
        is_wanted = np.isin(self.headers["rollout"], list(chosen))
        readers = for_readers(is_wanted, range(self._group.size() if on_all else 1))
        branches = self._fetch_branches(readers)
        values: dict[str, dict[int, np.ndarray]] = {}
        for name, column in (columns or {}).items():
            found = self._fetch_column(column, readers)
            values[name] = split_values(found.columns["values"], found.sequences, self.headers.num_response_tokens)
        result = []
        for part in (part for part in parts if part[0] in branches):
            masks = []
            for i in part:
                mask = branches[i].sampled & self.headers.rows["in_loss"][i]
                mask[:1] = False
                masks.append(mask[branches[i].num_prompt_tokens :])
            kept = {
                name: np.concatenate([pieces[i][mask] for i, mask in zip(part, masks, strict=True)])
                for name, pieces in values.items()
            }
            result.append((self._restore(part[0], [branches[i] for i in part], decode), kept))
        return result

    @property
    def rewards(self) -> np.ndarray:
        """Reward of each rollout, [num_rollouts] float64; rollouts of one prompt are adjacent."""
        return self.headers.rollouts["reward"]

    def measure_bytes(self) -> dict[str, float]:
        """Return `samples/bytes_per_rank`: bytes received, maximum over ranks; collective."""
        found = {"samples/bytes_per_rank": float(self.num_bytes)}
        return reduce_scalars(found, dist.ReduceOp.MAX, self._group, torch.device("cpu"))

    @classmethod
    def join(cls, parts: Sequence[Experience], groups: Sequence[int], metrics: Mapping[str, float]) -> Experience:
        """Join groups of several generations, without columns, in the given order.

        Args:
            groups: indices counted over the concatenated parts.
        """
        headers, order = join_headers([part.headers for part in parts]).select_groups(groups)
        prompts = [prompt for part in parts for prompt in part.prompts]
        places = {int(old): new for new, old in enumerate(order)}
        starts = np.cumsum([0, *(len(part.headers) for part in parts)]).tolist()
        branches = {
            places[start + index]: branch
            for start, part in zip(starts, parts, strict=False)
            for index, branch in part._payload.branches.items()
            if start + index in places
        }
        num_bytes = sum(part.num_bytes for part in parts)
        has_kept = any(part._payload.has_kept for part in parts)
        payload = replace(parts[0]._payload, branches=branches, num_bytes=num_bytes, has_kept=has_kept)
        return cls(headers, [prompts[group] for group in groups], payload, parts[0]._group, metrics=metrics)

    def select(self, groups: Sequence[int]) -> tuple[Experience, np.ndarray]:
        """Return groups, in ascending order, as an experience, and the indices of their sequences in this one, [k].

        The result has no columns, except if all groups are chosen: then it is this experience itself.
        """
        if len(groups) == len(self.prompts):
            return self, np.arange(len(self.headers))
        _, order = self.headers.select_groups(groups)
        return Experience.join([self], groups, {}), order

    def take(self, column: Column, order: np.ndarray, part: Experience, packer: Packer) -> torch.Tensor:
        """Copy a column of the selection `part` to a role's rows of this experience, [t, ...], else NaN; collective.

        Args:
            order, part: results of `select`.
        """
        packing = self.pack(packer)
        if column.packing is packing:
            return column.values
        holders = Holders(packing.holders.replica_of[order], packing.holders.ranks)
        found = part._fetch_column(column, holders)
        self.num_bytes += 0 if part is self else found.num_bytes
        values = column.values.new_full((len(packing.batch.tokens), *column.values.shape[1:]), torch.nan)
        values[packing.rows(order[found.sequences])] = found.columns["values"]
        return values

    def rescore(self, rewards: np.ndarray, name: str, scores: np.ndarray) -> Experience:
        """Return the same samples, without columns, with new rewards and a further component, [num_rollouts] each."""
        payload = replace(self._payload, num_bytes=self.num_bytes)
        return Experience(self.headers.rescore(rewards, name, scores), self.prompts, payload, self._group)

    def add_baselines(self, greedy: Experience) -> None:
        """Set the baselines to the rewards of the greedy responses; NaN for prompts without one."""
        self.baselines = np.where(greedy.headers.rollouts.has_reward, greedy.rewards, np.nan)
        self.num_bytes += greedy.num_bytes

    def _fetch_branches(self, destination: Holders) -> dict[int, Branch]:
        first = Holders(self._holders.replica_of, self._holders.ranks[:, :1])
        fetches = [partial(self._fetch, source, destination) for source in (self._holders, first)]
        return fetch_branches(self._payload, self.headers, *fetches)

    def _bring(self, name: str, packing: Packing, key: Hashable) -> torch.Tensor:
        column: Column = self.columns[name]
        if column.packing is packing:
            return column.values
        if (name, key) not in self._copies:
            found = self._fetch_column(column, packing.holders)
            copy = column.values.new_zeros(len(packing.batch.tokens), *column.values.shape[1:])
            copy[packing.rows(found.sequences)] = found.columns["values"]
            self._copies[name, key] = copy
        return self._copies[name, key]

    def _fetch_column(self, column: Column, destination: Holders) -> Fetched:
        size = column.values.shape[1:]

        def read(_: str, sequences: np.ndarray) -> torch.Tensor:
            return column.values[column.packing.rows(sequences)].flatten()

        source, lengths = column.holders or column.packing.holders, self.headers.num_response_tokens * size.numel()
        found = self._fetch(source, destination, lengths, {"values": column.values.dtype}, read)
        return replace(found, columns={"values": found.columns["values"].view(-1, *size)})

    def _fetch(
        self, source: Holders, destination: Holders, lengths: np.ndarray, dtypes: Mapping[str, torch.dtype], read: Read
    ) -> Fetched:
        found = fetch(plan_fetch(self._group.rank(), source, destination), lengths, dtypes, read, self._group)
        self.num_bytes += found.num_bytes
        return found

    def _restore(self, index: int, branches: list[Branch], decode: Callable[[list[int]], str]) -> Rollout:
        row, turns = self.headers.rows[index], find_runs(branches)
        if not self._payload.has_episodes:
            turns = [Turn(0, turns[0].start, turns[-1].stop)]
        rollout = Rollout(
            self.prompts[row["group"]],
            int(row["sample_index"]),
            branches,
            turns,
            FINISH_REASONS[row["finish_reason"]],
            reward=float(row["reward"]),
            reward_components=self.headers.reported(index),
        )
        return replace(rollout, response=decode(rollout.answer_tokens.tolist()))


def replicate(
    rollouts: Sequence[tuple[int, Rollout]],
    prompts: Sequence[Prompt],
    group: dist.ProcessGroup,
    *,
    mask_truncated: bool = False,
    baselines: np.ndarray | None = None,
) -> Experience:
    """Build the experience of rollouts that exist on every rank: fine-tuning examples or recorded rollouts.

    `rollouts` are pairs (prompt index, rollout), sorted. `mask_truncated` excludes truncated responses from the loss.
    """
    headers = build_headers(rollouts, holder=0, mask_truncated=mask_truncated)
    has_kept = any(branch.kept is not None for _, rollout in rollouts for branch in rollout.branches)
    found = [branch.routes for _, rollout in rollouts for branch in rollout.branches if branch.routes is not None]
    route_shape = RouteShape.of(found[0]) if found else None
    branches, ranks = index_branches(rollouts, headers), np.arange(group.size())[None]
    payload = Payload(branches, ranks, has_kept=has_kept, route_shape=route_shape)
    return Experience(headers, prompts, payload, group, baselines=baselines)


@dataclass(frozen=True)
class Minibatch:
    """The part of an Experience that one optimizer step trains on."""

    samples: Experience
    index: int


def check_kind(value: Any, kind: type | tuple[type, ...], call: str, expected: str = "") -> None:
    """Refuse an argument of a primitive that is of another type (UserError)."""
    if not isinstance(value, kind):
        expected = expected or f"{getattr(kind, '__name__', kind)}, of policy.sample or policy.minibatches"
        hint = "docs/primitives.md shows the order of the calls"
        raise UserError(f"a {type(value).__name__}: {value!r:.80}", source=call, expected=expected, hint=hint)


def find_runs(branches: Sequence[Branch]) -> list[Turn]:
    """Return one turn per run of consecutive sampled tokens, branch by branch."""
    turns = []
    for index, branch in enumerate(branches):
        edges = np.flatnonzero(np.diff(branch.sampled, prepend=False, append=False))
        turns += [Turn(index, int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
    return turns
