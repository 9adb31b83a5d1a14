# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs of advantage estimators, policy losses and aggregations, and sums over packed sequences.

Shapes of the sums depend on t only, for CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

MAX_LOG_RATIO = 20.0  # bound of exponentiated log-ratios: e^20 = 4.9e8 does not overflow float32, even squared


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


@dataclass(frozen=True)
class PolicyLossInputs:
    """Inputs of a policy loss for one microbatch, [t] each; sequences (branches of rollouts) are contiguous and whole.

    Attributes:
        logprobs: of the current policy, differentiable.
        old_logprobs: of the policy before the update.
        sequence_ids: int64; -1 on padding.
        chosen: bool, tokens picked by `choose_tokens`, or `None`.
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
    """Inputs of an aggregation, over all ranks of one minibatch.

    Attributes:
        lengths: [num_seqs] float64, tokens in the loss of each rollout; 0 if fully masked.
        max_response_length: `algorithm.loss_scale_factor`, or `data.max_response_length`.
    """

    lengths: np.ndarray
    max_response_length: int | float
    options: Any = None


@dataclass(frozen=True)
class SequenceWeights:
    """Output of an aggregation.

    Attributes:
        weights: [num_seqs] float64 weight of each token of a sequence; 0 without tokens in the loss.
    """

    weights: np.ndarray
    metrics: Mapping[str, float] = field(default_factory=dict)


def number_segments(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Number the runs of equal ids consecutively from 0, [t] int64; padding is a run of its own."""
    return sequence_ids.diff(prepend=sequence_ids[:1]).ne(0).cumsum(0)


def sum_per_segment(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Give every token the sum over its segment, [t] float64, because a GPU adds in arbitrary order."""
    sums = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    return sums.index_add(0, segments, values.double())[segments]


def mark_first(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Mark the first token of each run of equal ids, [t] bool."""
    return sequence_ids.diff(prepend=sequence_ids[:1] - 1).ne(0)
