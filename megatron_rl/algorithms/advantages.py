# SPDX-License-Identifier: Apache-2.0
"""Advantages: what an estimator is given, and what it returns.

The formulas are in `estimators.py`, their names in `catalog.py`. Per-rollout numbers (scores, group sizes) are the
same on every rank, so that a baseline over a group needs no communication; token-level tensors are the rank's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.catalog import (  # noqa: F401  plugins import the decorator from here
    find_advantage_estimator,
    register_advantage_estimator,
)
from megatron_rl.algorithms.segments import number_segments
from megatron_rl.config.options import find_options
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.types import UserError

_SETTING = "algorithm.adv_estimator"


@dataclass(frozen=True)
class AdvantageInputs:
    """What an advantage estimator may use; sequences are contiguous and whole in the flat [t] tensors.

    A response whose tokens are all masked (truncated, say) counts in the baseline of its group and gets no
    advantages. Otherwise its last token is in the loss.

    Attributes:
        scores: [num_rollouts] float64, reward of each rollout (minus its KL when `kl_in` is "reward"); the same
            on every rank.
        group_sizes: [num_groups] rollouts of each prompt, in order; they may differ.
        baselines: [num_groups] reward of the greedy response, for estimators that need it.
        token_rewards: [t] float32 from `compute_token_rewards`.
        values: [t] of the critic; `values[i]` is the value of the state in which `tokens[i]` was chosen.
        loss_mask: [t] bool, response tokens in the loss.
        sequence_ids: [t] int64, index of the sequence; -1 on padding.
        group: the data parallel group over whose ranks the rollouts are spread.
        rollout_ids: [t] int64, index of the rollout that each token of a sequence belongs to; None: every rollout is
            one sequence.
        old_logprobs: [t] of the policy before the update.
        sum_pi_squared: [t] sum over the vocabulary of its squared probabilities, for estimators that need it.
        importance_weights: [t] from `compute_importance_weights`, or None.
        options: of the estimator, see `register_advantage_estimator`.
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

    def grouped_scores(self) -> list[np.ndarray]:
        """Scores of each group: [num_groups][group size] float64."""
        return np.split(np.asarray(self.scores, np.float64), np.cumsum(self.group_sizes)[:-1])

    def expand(self, per_rollout: Sequence[float] | np.ndarray) -> torch.Tensor:
        """Give every token in the loss its rollout's value: [num_rollouts] -> [t] float32, 0 elsewhere."""
        table = torch.tensor([*per_rollout, 0.0], dtype=torch.float32, device=self.loss_mask.device)
        return torch.where(self.loss_mask, table[self.find_rollouts()], 0.0)

    def find_rollouts(self) -> torch.Tensor:
        """Index of the rollout that each token belongs to, [t] int64; on padding some other number."""
        return self.sequence_ids if self.rollout_ids is None else self.rollout_ids


@dataclass(frozen=True)
class Advantages:
    """What an estimator makes of a batch.

    Attributes:
        advantages: [t] float32, 0 outside the loss mask.
        returns: [t] float32, what the critic learns to predict; None where the estimator has no such thing.
        metrics: of the estimator, by name: a number that is the same on every rank, as all that is made of scores is;
            or a tensor [t], whose mean over the tokens in the loss of all ranks is logged.
    """

    advantages: torch.Tensor
    returns: torch.Tensor | None = None
    metrics: Mapping[str, float | torch.Tensor] = field(default_factory=dict)


def compute_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Estimate advantages as the config says.

    Collective over `inputs.group` for estimators that whiten, and for metrics that are tensors.

    Returns:
        Advantages and returns, 0 outside of the loss; the metrics are numbers called `estimator/<name>/<metric>`.

    Raises:
        UserError: unknown estimator, one that needs values without a critic, or a user's one that returns
            something else than [t] tensors.
    """
    name = config.adv_estimator
    estimator = find_advantage_estimator(name)
    if estimator.needs_values and inputs.values is None:
        raise UserError(
            f'{_SETTING} = "{name}" needs values, and there is no critic', source=_SETTING, expected="a critic",
            hint="set critic.enable=true, or choose an estimator that works on rewards only")
    assert inputs.baselines is not None or not estimator.needs_greedy_baseline, f"{name} needs greedy baselines"
    result = estimator.estimate(replace(inputs, options=find_options(config, name)), config)
    if not isinstance(result, Advantages):
        result = Advantages(result)
    returns = result.returns
    return Advantages(
        _finish(result.advantages, inputs, f"{name}: advantages"),
        None if returns is None else _finish(returns, inputs, f"{name}: returns"),
        {f"estimator/{name}/{metric}": _average(value, inputs, f"{name}: metric {metric}")
         for metric, value in result.metrics.items()})


def _average(value: float | torch.Tensor, inputs: AdvantageInputs, what: str) -> float:
    """A number as it is; of a tensor [t] the mean over the tokens in the loss, collective."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return float(value)
    sums = torch.stack([_finish(value, inputs, what).double().sum(), inputs.loss_mask.sum().double()])
    dist.all_reduce(sums, group=inputs.group)
    total, count = sums.tolist()
    return total / max(count, 1.0)


def _finish(values: torch.Tensor, inputs: AdvantageInputs, what: str) -> torch.Tensor:
    """float32 and 0 outside the mask, whatever an estimator left there."""
    expected = list(inputs.loss_mask.shape)
    if not isinstance(values, torch.Tensor) or list(values.shape) != expected:
        found = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise UserError(
            f"the estimator returned {found}", source=what,
            expected=f"a tensor of shape {expected}, one number per token",
            hint="inputs.expand makes it from one number per rollout")
    return torch.where(inputs.loss_mask, values, 0.0).float()


def compute_token_rewards(
    rewards: Sequence[float] | np.ndarray, kl: torch.Tensor | None, kl_coef: float, loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor,
) -> torch.Tensor:
    """Reward of each token (Ziegler et al., arXiv 1909.08593, eq. 2): the response's on its last token, minus KL.

    Args:
        rewards: [num_sequences].
        kl: [t] from `compute_kl_penalty`, or None when the KL term is not in the reward.
        kl_coef: its weight.
        loss_mask: [t] bool, response tokens in the loss.
        sequence_ids: [t] int64, index of the rollout; -1 on padding.

    Returns:
        [t] float32; 0 outside the mask.
    """
    segments = number_segments(sequence_ids)
    positions = torch.where(loss_mask, torch.arange(len(loss_mask), device=loss_mask.device), -1)
    last = torch.full_like(positions, -1).scatter_reduce(0, segments, positions, "amax")[segments]
    table = torch.tensor([*rewards, 0.0], dtype=torch.float32, device=loss_mask.device)
    token_rewards = torch.where(loss_mask & (positions == last), table[sequence_ids], 0.0)
    if kl is not None:
        token_rewards = token_rewards - kl_coef * torch.where(loss_mask, kl, 0.0)
    return token_rewards
