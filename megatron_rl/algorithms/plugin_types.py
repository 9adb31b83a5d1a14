# SPDX-License-Identifier: Apache-2.0
"""What estimators, policy losses and aggregations are given, and what they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class AdvantageInputs:
    """What an advantage estimator may use; sequences are contiguous and whole in the flat [t] tensors.

    A response whose tokens are all masked (truncated, say) counts in the baseline of its group and gets no
    advantages. Otherwise its last token is in the loss. A rollout that has no reward, because its episode or the reward
    service failed, is left out before an estimator is called: no score, no size and no index counts it.

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
        has_reward: [num_rollouts] bool, as `compute_advantages` is given them; None, as estimators are: all have one.
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
    has_reward: np.ndarray | None = None

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


@dataclass(frozen=True)
class PolicyLossInputs:
    """Inputs of a policy loss, [t] each, of one microbatch; sequences are contiguous and whole.

    A sequence is one branch of a rollout; further branches may be in other microbatches and on other ranks.

    Attributes:
        logprobs: of the current policy, differentiable.
        old_logprobs: of the policy before the update.
        advantages: per token.
        loss_mask: bool, response tokens in the loss.
        sequence_ids: int64, index of the sequence; -1 on padding.
        chosen: bool, tokens that `choose_tokens` picked out of the whole step; None: the loss needs none.
        options: of the loss, see `register_policy_loss`.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    sequence_ids: torch.Tensor
    chosen: torch.Tensor | None = None
    options: Any = None


@dataclass(frozen=True)
class AggregationInputs:
    """What an aggregation may use: the lengths of one minibatch, over all ranks.

    Attributes:
        lengths: [num_seqs] float64, tokens in the loss of each rollout; 0 where all are masked.
        max_response_length: `algorithm.loss_scale_factor`, or `data.max_response_length`.
        options: of the aggregation, see `register_loss_aggregation`.
    """

    lengths: np.ndarray
    max_response_length: int | float
    options: Any = None


@dataclass(frozen=True)
class SequenceWeights:
    """What an aggregation makes of a minibatch.

    Attributes:
        weights: [num_seqs] float64, of each token of each sequence; 0 for those without a token in the loss.
        metrics: of the aggregation, by name.
    """

    weights: np.ndarray
    metrics: Mapping[str, float] = field(default_factory=dict)
