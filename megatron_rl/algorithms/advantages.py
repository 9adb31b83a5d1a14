# SPDX-License-Identifier: Apache-2.0
"""Advantages by the configured estimator, token rewards, and GRPO's estimator; `estimators.py` has the further ones.

Scores and group sizes are equal on every rank, so group baselines need no communication; [t] tensors are the rank's
own. In the built-in estimators, groups of equal rewards and groups of one have advantages of exactly 0; arithmetic is
float64, results are float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.catalog import (  # noqa: F401  plugins import the decorator from here
    ADVANTAGE_ESTIMATORS,
    register_advantage_estimator,
)
from megatron_rl.algorithms.losses import find_options, number_segments
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.types import UserError


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage estimator; sequences are contiguous and whole in the flat [t] tensors.

    A fully masked response counts in its group's baseline but gets no advantages. Rollouts without a reward (failed
    episode or reward service) are dropped before an estimator is called.

    Attributes:
        scores: [num_rollouts] float64, rewards (minus KL if `kl_in` is "reward"), equal on every rank.
        group_sizes: [num_groups] rollouts per prompt, in order.
        baselines: [num_groups] reward of the greedy response, if needed.
        token_rewards: [t] float32 from `compute_token_rewards`.
        values: [t]; `values[i]` is the critic's value of the state in which `tokens[i]` was chosen.
        loss_mask: [t] bool.
        sequence_ids: [t] int64; -1 on padding.
        group: data parallel group over which the rollouts are spread.
        rollout_ids: [t] int64; `None` if every rollout is one sequence.
        old_logprobs: [t] of the policy before the update.
        sum_pi_squared: [t] sum of squared probabilities over the vocabulary, if needed.
        importance_weights: [t], or `None`.
        components: name -> [num_rollouts] float64 of each reward component; NaN where a rollout does not report it.
        has_reward: [num_rollouts] bool; always `None` for estimators.
        weights: weight of each source of `reward.components` in this step, by the name of its component.
        turn_rewards: [t] float32, each turn's reward at its last token, or `None`.
        turn_states: [t] int64, state of each turn at its first token (see `Branch`), else 0; `None` without episodes.
    """

    scores: np.ndarray
    group_sizes: np.ndarray
    baselines: np.ndarray | None
    token_rewards: torch.Tensor
    values: torch.Tensor | None
    loss_mask: torch.Tensor
    sequence_ids: torch.Tensor
    group: dist.ProcessGroup
    rollout_ids: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    sum_pi_squared: torch.Tensor | None = None
    importance_weights: torch.Tensor | None = None
    options: Any = None
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    has_reward: np.ndarray | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: torch.Tensor | None = None
    turn_states: torch.Tensor | None = None

    def grouped_scores(self) -> list[np.ndarray]:
        """Return the scores of each group: [num_groups][group size] float64."""
        return np.split(np.asarray(self.scores, np.float64), np.cumsum(self.group_sizes)[:-1])

    def expand(self, per_rollout: Sequence[float] | np.ndarray) -> torch.Tensor:
        """Give every token in the loss its rollout's value: [num_rollouts] -> [t] float32, 0 elsewhere."""
        table = torch.tensor([*per_rollout, 0.0], dtype=torch.float32, device=self.loss_mask.device)
        return torch.where(self.loss_mask, table[self.find_rollouts()], 0.0)

    def find_rollouts(self) -> torch.Tensor:
        """Return the index of each token's rollout, [t] int64; arbitrary on padding."""
        return self.sequence_ids if self.rollout_ids is None else self.rollout_ids


@dataclass(frozen=True)
class Advantages:
    """Output of an advantage estimator.

    Attributes:
        advantages: [t] float32, 0 outside the loss mask.
        returns: [t] float32 targets for the critic, or `None`.
        metrics: number equal on every rank, or tensor [t] to average over all ranks' tokens in the loss.
    """

    advantages: torch.Tensor
    returns: torch.Tensor | None = None
    metrics: Mapping[str, float | torch.Tensor] = field(default_factory=dict)


_SETTING = "algorithm.adv_estimator"


def compute_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Compute advantages with the configured estimator, over the rollouts that have a reward.

    Collective over `inputs.group` for estimators that whiten, and for tensor metrics.

    Returns:
        Advantages and returns, 0 outside the loss, and metrics `estimator/<name>/<metric>`.

    Raises:
        UserError: unknown estimator, missing critic, or a plugin's result is not [t] tensors.
    """
    name = config.adv_estimator
    estimator = ADVANTAGE_ESTIMATORS[name]
    if estimator.needs_values and inputs.values is None:
        raise UserError(
            f'{_SETTING} = "{name}" needs values, and there is no critic',
            source=_SETTING,
            expected="a critic",
            hint="choose an estimator that works on rewards only",
        )
    assert inputs.baselines is not None or not estimator.needs_greedy_baseline, f"{name} needs greedy baselines"
    inputs = _leave_out_failed(replace(inputs, options=find_options(config, name)), estimator.needs_group)
    if not len(inputs.scores):
        nothing = torch.zeros_like(inputs.token_rewards)
        return Advantages(nothing, nothing if estimator.needs_values else None)
    result = estimator.estimate(inputs, config)
    if not isinstance(result, Advantages):
        result = Advantages(result)
    returns = result.returns
    return Advantages(
        _finish(result.advantages, inputs, f"{name}: advantages"),
        None if returns is None else _finish(returns, inputs, f"{name}: returns"),
        {
            f"estimator/{name}/{metric}": _average(value, inputs, f"{name}: metric {metric}")
            for metric, value in result.metrics.items()
        },
    )


def _leave_out_failed(inputs: AdvantageInputs, needs_group: bool) -> AdvantageInputs:
    """Drop rollouts without a reward or baseline, and if `needs_group`, those that are alone in their group."""
    groups = np.repeat(np.arange(len(inputs.group_sizes)), inputs.group_sizes)
    kept = np.ones(len(groups), bool) if inputs.has_reward is None else inputs.has_reward
    if inputs.baselines is not None:
        kept = kept & ~np.isnan(inputs.baselines)[groups]
    if kept.all():
        return replace(inputs, has_reward=None)
    if needs_group:
        kept = kept & (np.bincount(groups, kept, len(inputs.group_sizes)) > 1)[groups]
    sizes = np.bincount(groups[kept], minlength=len(inputs.group_sizes))
    count = int(kept.sum())
    numbers = torch.from_numpy(np.append(np.where(kept, np.cumsum(kept) - 1, count), count)).to(inputs.loss_mask.device)
    rollout_ids = numbers[inputs.find_rollouts()]
    return replace(
        inputs,
        scores=inputs.scores[kept],
        group_sizes=sizes[sizes > 0],
        baselines=None if inputs.baselines is None else inputs.baselines[sizes > 0],
        loss_mask=inputs.loss_mask & (rollout_ids < count),
        components={name: values[kept] for name, values in inputs.components.items()},
        rollout_ids=rollout_ids,
        has_reward=None,
    )


def _average(value: float | torch.Tensor, inputs: AdvantageInputs, what: str) -> float:
    """Reduce a metric to a number: a tensor [t] is averaged over all ranks' tokens in the loss; collective."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return float(value)
    sums = torch.stack([_finish(value, inputs, what).double().sum(), inputs.loss_mask.sum().double()])
    dist.all_reduce(sums, group=inputs.group)
    total, count = sums.tolist()
    return total / max(count, 1.0)


def _finish(values: torch.Tensor, inputs: AdvantageInputs, what: str) -> torch.Tensor:
    """Check an estimator's result and return it as float32, 0 outside the mask."""
    expected = list(inputs.loss_mask.shape)
    if not isinstance(values, torch.Tensor) or list(values.shape) != expected:
        found = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise UserError(
            f"the estimator returned {found}",
            source=what,
            expected=f"a tensor of shape {expected}, one number per token",
            hint="inputs.expand makes it from one number per rollout",
        )
    return torch.where(inputs.loss_mask, values, 0.0).float()


def compute_token_rewards(
    rewards: Sequence[float] | np.ndarray,
    kl: torch.Tensor | None,
    kl_coef: float,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor,
    turn_rewards: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute token rewards: the sequence's reward on its last token, minus KL on every token.

    Ziegler et al., arXiv 1909.08593, eq. 2. An episode that forked has a sequence per branch; a branch's last
    token also gets the rewards of later turns in other branches.

    Args:
        rewards: [num_sequences], sum of the turn rewards from the sequence's last turn on.
        kl: [t], or `None` if KL is not in the reward.
        sequence_ids: [t] int64; -1 on padding.
        turn_rewards: [t], each turn's reward at its last token, except for a sequence's last turn.

    Returns:
        [t] float32; 0 outside the mask.
    """
    segments = number_segments(sequence_ids)
    positions = torch.where(loss_mask, torch.arange(len(loss_mask), device=loss_mask.device), -1)
    last = torch.full_like(positions, -1).scatter_reduce(0, segments, positions, "amax")[segments]
    table = torch.tensor([*rewards, 0.0], dtype=torch.float32, device=loss_mask.device)
    earlier = torch.zeros_like(table[:1]) if turn_rewards is None else torch.where(loss_mask, turn_rewards, 0.0)
    token_rewards = torch.where(loss_mask & (positions == last), table[sequence_ids], earlier)
    if kl is not None:
        token_rewards = token_rewards - kl_coef * torch.where(loss_mask, kl, 0.0)
    return token_rewards


STD_EPSILON = 1e-6


def compute_grpo_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Compute group-relative advantages (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)          std unbiased; not divided if `norm_adv_by_std=False`
    """
    groups = inputs.grouped_scores()
    return inputs.expand(np.concatenate([normalize_scores(scores, config.norm_adv_by_std) for scores in groups]))


def normalize_scores(scores: np.ndarray, by_std: bool) -> np.ndarray:
    """Subtract the mean, and divide by the standard deviation if `by_std`; one score alone becomes 0."""
    is_divided = by_std and len(scores) > 1
    return centre(scores) / (scores.std(ddof=1) + STD_EPSILON) if is_divided else centre(scores)


def centre_scores(inputs: AdvantageInputs) -> np.ndarray:
    """Subtract the mean of its group from each score, [num_rollouts]; equal scores become exactly 0."""
    return np.concatenate([centre(scores) for scores in inputs.grouped_scores()])


def centre(scores: np.ndarray) -> np.ndarray:
    """Subtract the mean of a group's scores; equal scores become exactly 0."""
    shifted = scores - scores[0]
    return shifted - shifted.mean()
