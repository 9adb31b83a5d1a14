# SPDX-License-Identifier: Apache-2.0
"""Headers: one row of numbers per sequence of a step, the same on every rank.

Every decision about a step is a pure function of its headers: minibatches, packing, baselines, denominators, metrics,
and who sends which tokens to whom. Tokens and texts stay where they were generated.

A sequence is one branch of a rollout, and the branches of a rollout follow each other, as the rollouts of a group do.
Baselines, denominators and metrics count rollouts; with one branch per rollout both numberings are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
import torch.distributed as dist

from megatron_rl.parallel.collectives import gather_flat
from megatron_rl.rewards.validation import name_answer
from megatron_rl.samples.prefix import arrange_branches
from megatron_rl.types import FAILED, SERVICE_FAILURES, Branch, Rollout, has_reward

FINISH_REASONS = ("stop", "length", "turns", "timeout", "error")
_CUT = ("length", "turns")

HEADER = np.dtype(
    [
        ("prompt_id", np.int32),
        ("answer", np.uint64),  # see `hash_answer`; 0 where nobody asked
        ("prompt_routes", np.uint64),  # hash of the prompt's routes; 0 where they are not known
        ("reward", np.float64),
        ("earlier_reward", np.float64),  # of it, what turns before the last one of this sequence have got
        ("sample_index", np.int16),
        ("place", np.int16),  # see `arrange_branches`
        ("num_shared", np.int32),  # likewise
        ("group", np.int32),  # index of the prompt in the step
        ("rollout", np.int32),  # index of the rollout in the step
        ("num_prompt_tokens", np.int32),
        ("num_tokens", np.int32),
        ("num_sampled", np.int32),  # that can be learned: position 0 is predicted by nothing
        ("holder", np.int32),  # index of the replica that holds the tokens, see `fetch.Holders`
        ("first_version", np.int32),
        ("last_version", np.int32),
        ("finish_reason", np.int8),  # index in FINISH_REASONS
        ("in_loss", np.bool_),
        ("has_turn_rewards", np.bool_),
    ]
)


@dataclass(frozen=True)
class Headers:
    """What every rank knows of each sequence.

    Attributes:
        rows: [n] of HEADER, sorted by group, sample and branch.
        names: of the reward components, in the order in which rewards report them.
        components: [n, len(names)] float64; NaN: this rollout's reward does not report it.
    """

    rows: np.ndarray
    names: tuple[str, ...]
    components: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, field: str) -> np.ndarray:
        """One field of all sequences, [n]."""
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
        """False where the episode of a sequence, or the reward service, has failed, [n]: such rewards mean nothing."""
        return ~self.has_failed & ~(self.component(SERVICE_FAILURES) > 0)

    @cached_property
    def num_response_tokens(self) -> np.ndarray:
        """Tokens behind the prompt, [n]."""
        return self["num_tokens"] - self["num_prompt_tokens"]

    @cached_property
    def first_of_rollout(self) -> np.ndarray:
        """Index of the first sequence of each rollout, [num_rollouts]."""
        return np.unique(self.rows["rollout"], return_index=True)[1]

    @cached_property
    def rollouts(self) -> Headers:
        """One row per rollout: its first branch, of which all but the numbers of tokens holds for the whole rollout."""
        return Headers(self.rows[self.first_of_rollout], self.names, self.components[self.first_of_rollout])

    @cached_property
    def group_sizes(self) -> np.ndarray:
        """Rollouts of each group, [num_groups]."""
        return np.bincount(self.rollouts.rows["group"])

    def sum_per_rollout(self, values: np.ndarray) -> np.ndarray:
        """Add up what belongs to the sequences of a rollout: [n] -> [num_rollouts]."""
        return np.add.reduceat(values, self.first_of_rollout)

    def split_rewarded(self, values: np.ndarray) -> list[np.ndarray]:
        """Numbers of the rollouts that have a reward, by group: [num_rollouts] -> [num_groups][k]."""
        has_reward = self.rollouts.has_reward
        sizes = np.bincount(self.rollouts["group"][has_reward], minlength=len(self.group_sizes))
        return np.split(values[has_reward], np.cumsum(sizes)[:-1])

    def component(self, name: str) -> np.ndarray:
        """A reward component of all sequences, [n]; NaN where it is not reported."""
        if name not in self.names:
            return np.full(len(self), np.nan)
        return np.ascontiguousarray(self.components[:, self.names.index(name)])

    def reported(self, index: int) -> dict[str, float]:
        """The reward components of one sequence by name."""
        return {
            name: float(value)
            for name, value in zip(self.names, self.components[index], strict=True)
            if not np.isnan(value)
        }

    def list_titles(self) -> list[str]:
        """What a message calls each sequence."""
        pairs = zip(self.rows["prompt_id"].tolist(), self.rows["sample_index"].tolist(), strict=True)
        return [f"prompt_id {prompt}, sample {sample}" for prompt, sample in pairs]

    def rescore(self, rewards: np.ndarray, name: str, scores: np.ndarray) -> Headers:
        """Other rewards, and a further component: both [num_rollouts]."""
        rows, rollout = self.rows.copy(), self.rows["rollout"]
        rows["reward"] = rewards[rollout]
        return Headers(rows, (*self.names, name), np.column_stack([self.components, scores[rollout]]))

    def select_groups(self, groups: Sequence[int]) -> tuple[Headers, np.ndarray]:
        """Some groups in the order given, renumbered; and where each of their sequences stood before, [k]."""
        bounds = np.searchsorted(self.rows["group"], [[group, group + 1] for group in groups]).reshape(-1, 2)
        order = np.concatenate([np.arange(*bound) for bound in bounds]) if len(bounds) else np.zeros(0, np.int64)
        rows = self.rows[order].copy()
        rows["group"] = np.repeat(np.arange(len(bounds)), bounds[:, 1] - bounds[:, 0])
        return Headers(_number_rollouts(rows), self.names, self.components[order]), order


def build_headers(
    rollouts: Iterable[tuple[int, Rollout]], *, holder: int, mask_truncated: bool = False, with_answers: bool = False
) -> Headers:
    """The headers of rollouts that are here.

    Args:
        rollouts: with the index of their prompt in the step.
        holder: index of the replica that holds their tokens.
        mask_truncated: keep responses that were cut at a limit out of the loss; those without a reward always are.
        with_answers: note what they answer (see `hash_answer`).
    """
    found, rows = list(rollouts), []
    for group, rollout in found:
        answer = hash_answer(name_answer(rollout.response)) if with_answers else 0
        is_cut = mask_truncated and rollout.finish_reason in _CUT
        in_loss = has_reward(rollout.finish_reason, rollout.reward_components) and not is_cut
        reason = FINISH_REASONS.index(rollout.finish_reason)
        earlier = 0.0
        for branch, place, num_shared in zip(rollout.branches, *arrange_branches(rollout.branches), strict=True):
            earlier, before = earlier + _sum_rewards(branch), earlier + _sum_rewards(branch, len(branch.tokens) - 1)
            versions = branch.versions[branch.sampled]
            first, last = (versions.min(), versions.max()) if len(versions) else (0, 0)
            rows.append(
                (
                    rollout.prompt.prompt_id,
                    answer,
                    _hash_routes(branch),
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


def _sum_rewards(branch: Branch, stop: int | None = None) -> float:
    return 0.0 if branch.rewards is None else float(branch.rewards[:stop].sum(dtype=np.float64))


def join_headers(parts: Sequence[Headers]) -> Headers:
    """The headers of several generations as of one; groups are numbered on."""
    names = merge_names(part.names for part in parts)
    rows, first = [], 0
    for part in parts:
        rows.append(part.rows.copy())
        rows[-1]["group"] += first
        first += len(part.group_sizes)
    components = [_components_by(names, part) for part in parts]
    return Headers(_number_rollouts(np.concatenate(rows)), names, np.concatenate(components))


def gather_headers(mine: Headers, group: dist.ProcessGroup) -> tuple[Headers, int]:
    """Headers of all ranks, and the bytes that this rank received for them; collective, as arrays of numbers.

    Args:
        mine: those that this rank contributes; every rollout is contributed by one rank, whole.
        group: all ranks.
    """
    texts, received = gather_flat(np.frombuffer("\n".join(mine.names).encode(), np.uint8), group)
    names = merge_names(bytes(text).decode().split("\n") if len(text) else [] for text in texts)
    packed = np.zeros(len(mine), [("row", HEADER), ("components", np.float64, (len(names),))])
    packed["row"], packed["components"] = mine.rows, _components_by(names, mine)
    parts, more = gather_flat(packed.view(np.uint8), group)
    found = np.concatenate(parts).view(packed.dtype)
    return _sort(Headers(found["row"], names, found["components"].reshape(len(found), len(names)))), received + more


def merge_names(lists: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """All names, each once; the order of every list is kept where the lists do not contradict each other."""
    merged: list[str] = []
    for names in lists:
        place = 0
        for name in names:
            if name not in merged:
                merged.insert(place, name)
            place = merged.index(name) + 1
    return tuple(merged)


def hash_answer(answer: str) -> int:
    """8 bytes that stand for an answer where only its identity matters."""
    return int.from_bytes(blake2b(answer.encode("utf-8", "backslashreplace"), digest_size=8).digest(), "little")


def _hash_routes(branch: Branch) -> int:
    """8 bytes that stand for the routes of a prompt; 0: they are not known."""
    if branch.routes is None:
        return 0
    prompt = branch.routes[: branch.num_prompt_tokens]
    return int.from_bytes(blake2b(prompt.tobytes(), digest_size=8).digest(), "little")


def _components_by(names: Sequence[str], headers: Headers) -> np.ndarray:
    return np.stack([headers.component(name) for name in names], axis=1) if names else np.zeros((len(headers), 0))


def _sort(headers: Headers) -> Headers:
    order = np.lexsort((headers.rows["sample_index"], headers.rows["group"]))  # stable: branches keep their order
    return Headers(_number_rollouts(headers.rows[order]), headers.names, headers.components[order])


def _number_rollouts(rows: np.ndarray) -> np.ndarray:
    """Write the number of its rollout into each of the sorted rows."""
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (np.diff(rows["group"]) != 0) | (np.diff(rows["sample_index"]) != 0)
    rows["rollout"] = np.cumsum(is_first) - 1
    return rows
