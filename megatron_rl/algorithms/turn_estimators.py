# SPDX-License-Identifier: Apache-2.0
"""Estimators that give each turn of an episode its own advantage, loaded when `algorithm.adv_estimator` names one.

A response without an episode is one turn. A turn's reward is the environment's; the last turn has the rest of the
rollout's score, such as the overlong penalty. Discounts (`algorithm.gamma`) are per turn, not per token. Arithmetic is
float64, and with one turn per rollout that of GRPO, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.advantages import AdvantageInputs, Advantages, normalize_scores
from megatron_rl.algorithms.losses import mark_first, number_segments
from megatron_rl.config.schema import AlgorithmConfig


@dataclass(frozen=True)
class EpisodeTurns:
    """The n turns of all rollouts, by rollout, branch and time; arrays are equal on every rank.

    Attributes:
        rollouts: [n] index of each turn's rollout.
        numbers: [n] index of the turn in its rollout.
        groups: [n] index of the rollout's prompt.
        rewards: [n] float64; the rewards of a rollout add up to its score.
        states: [n] int64, see `Branch`.
        of_tokens: [t] int64 index of each of this rank's tokens; n where there is no turn.
    """

    rollouts: np.ndarray
    numbers: np.ndarray
    groups: np.ndarray
    rewards: np.ndarray
    states: np.ndarray
    of_tokens: torch.Tensor

    def sum_ahead(self, gamma: float) -> np.ndarray:
        """Return the discounted returns, [n] float64: a turn's reward + gamma * return of the rollout's next turn."""
        returns = self.rewards.copy()
        for turn in range(len(returns) - 2, -1, -1):
            if self.numbers[turn + 1]:
                returns[turn] += gamma * returns[turn + 1]
        return returns

    def expand(self, values: np.ndarray, loss_mask: torch.Tensor) -> torch.Tensor:
        """Give every token in the loss its turn's value: [n] -> [t] float32, 0 elsewhere."""
        table = torch.tensor([*values, 0.0], dtype=torch.float32, device=loss_mask.device)
        return torch.where(loss_mask, table[self.of_tokens], 0.0)


def collect_turns(inputs: AdvantageInputs) -> EpisodeTurns:
    """Find the turns of this rank's tokens, and sum rewards and states over the ranks; collective."""
    ids, device = inputs.sequence_ids, inputs.loss_mask.device
    held, rollouts, first = ids >= 0, inputs.find_rollouts(), mark_first(ids)
    begins = torch.zeros_like(ids) if inputs.turn_states is None else inputs.turn_states.ne(0).long()
    begun = begins.cumsum(0)
    places = (begun - (begun - begins)[first][number_segments(ids)] - 1).clamp(min=0)  # number in the sequence
    count = ids.amax() + 1 if len(ids) else torch.zeros((), dtype=torch.int64, device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=inputs.group)
    table = torch.zeros(2, int(count), dtype=torch.int64, device=device)  # rollout + 1, and turns of each sequence
    table[0, ids[held]] = torch.where(rollouts < len(inputs.scores), rollouts + 1, 0)[held]
    table[1].scatter_reduce_(0, ids[held], places[held] + 1, "amax")
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=inputs.group)
    owners, sizes = table.cpu().numpy()
    sizes = np.where(owners > 0, sizes, 0)  # left out: failed rollouts
    total = int(sizes.sum())
    starts = torch.from_numpy(np.append(np.where(sizes, np.cumsum(sizes) - sizes, total), total)).to(device)
    of_tokens = torch.where(starts[ids] < total, starts[ids] + places, total)
    found = torch.zeros(total + 1, dtype=torch.float64, device=device)
    states = torch.zeros(total + 1, dtype=torch.int64, device=device)
    if inputs.turn_rewards is not None:
        found.index_add_(0, of_tokens, inputs.turn_rewards.double())
    if inputs.turn_states is not None:
        states.index_add_(0, of_tokens, inputs.turn_states)
    for column in (found, states):  # each turn is on one rank
        dist.all_reduce(column, group=inputs.group)
    rewards, owner = found[:-1].cpu().numpy(), np.repeat(owners - 1, sizes)
    lengths = np.bincount(owner, minlength=len(inputs.scores))
    ends = np.cumsum(lengths)
    numbers = np.arange(total) - np.repeat(ends - lengths, lengths)
    last = ends[lengths > 0] - 1
    rewards[last] = 0.0
    rewards[last] = (inputs.scores - np.bincount(owner, rewards, len(inputs.scores)))[lengths > 0]
    groups = np.repeat(np.arange(len(inputs.group_sizes)), inputs.group_sizes)[owner]
    return EpisodeTurns(owner, numbers, groups, rewards, states[:-1].cpu().numpy(), of_tokens)


def compute_grpo_turns_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Compute group-relative advantages of the discounted return from each turn on.

        G_ik = sum_{j >= k} gamma^(j-k) r_ij            r_ij the reward of turn j of rollout i
        A_ik = (G_ik - mean(G)) / (std(G) + 1e-6)       not divided if `norm_adv_by_std=False`

    Mean and deviation are over the group's rollouts at turn k (`baseline` "turn"; a turn that one rollout alone
    reaches has A = 0), or over all turns of the group's rollouts ("group"). Collective.
    """
    turns = collect_turns(inputs)
    by_turn = inputs.options.baseline == "turn"
    keys = np.stack([turns.groups, turns.numbers if by_turn else np.zeros_like(turns.numbers)], axis=1)
    values, _ = normalize_by(keys, turns.sum_ahead(config.gamma), config.norm_adv_by_std)
    return turns.expand(values, inputs.loss_mask)


def compute_gigpo_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Compute group-in-group advantages (GiGPO, arXiv 2505.10978, eq. 3 to 8).

        A_ik = A^E_i + step_weight A^S_ik
        A^E_i    GRPO's advantage of the rollout's score
        A^S_ik   the same of the discounted return from turn k on, over the turns of the group in the same state

    A turn whose state is met once has A^S = 0. Collective.
    """
    turns, by_std = collect_turns(inputs), config.norm_adv_by_std
    episodes = np.concatenate([normalize_scores(scores, by_std) for scores in inputs.grouped_scores()])
    keys = np.stack([turns.groups, turns.states], axis=1)
    steps, sizes = normalize_by(keys, turns.sum_ahead(config.gamma), by_std)
    values = episodes[turns.rollouts] + inputs.options.step_weight * steps
    return Advantages(
        turns.expand(values, inputs.loss_mask),
        metrics={"state_size": sizes.mean(), "lone_turns": (sizes == 1).mean()} if len(sizes) else {},
    )


def normalize_by(keys: np.ndarray, values: np.ndarray, by_std: bool) -> tuple[np.ndarray, np.ndarray]:
    """Normalize values among those with equal keys.

    Args:
        keys: [n, 2] int64.
        values: [n].

    Returns:
        `normalize_scores` of each set, and the size of each value's set, [n] each.
    """
    _, sets, sizes = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    sets = sets.reshape(-1)
    order, found = np.argsort(sets, kind="stable"), np.zeros_like(values)
    for members in np.split(order, np.cumsum(sizes)[:-1]):
        found[members] = normalize_scores(values[members], by_std)
    return found, sizes[sets]
