# SPDX-License-Identifier: Apache-2.0
"""Headers: one row of numbers per sequence of a step, equal on every rank.

Every decision about a step is a pure function of its headers. Tokens and texts stay on the ranks that generated them.

A sequence is one branch (context window) of a rollout. Baselines, denominators and metrics count rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
import torch.distributed as dist

from megatron_rl.parallel.collectives import gather_flat
from megatron_rl.rewards.answers import name_answer
from megatron_rl.types import FAILED, SERVICE_FAILURES, Rollout, has_reward

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
        ("holder", np.int32),  # replica that holds the tokens, see `fetch.Holders`
        ("first_version", np.int32),
        ("last_version", np.int32),
        ("finish_reason", np.int8),  # index in FINISH_REASONS
        ("in_loss", np.bool_),
        ("has_turn_rewards", np.bool_),
    ]
)


@dataclass(frozen=True)
class Headers:
    """Table of numbers, one row per sequence of a step; a group is the rollouts of one prompt.

    Attributes:
        rows: [n] of HEADER, sorted by group, sample and branch.
        names: names of the reward components, in reported order.
        components: [n, len(names)] float64; NaN if the rollout does not report the component.
    """

    rows: np.ndarray
    names: tuple[str, ...]
    components: np.ndarray

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
        answer = _hash(name_answer(rollout.response).encode("utf-8", "backslashreplace")) if with_answers else 0
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
                    0 if branch.routes is None else _hash(branch.routes[: branch.num_prompt_tokens].tobytes()),
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


def _hash(data: bytes) -> int:
    """Hash an answer or expert routes to 64 bits, so that headers can be compared for equal contents."""
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
