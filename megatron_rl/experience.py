# SPDX-License-Identifier: Apache-2.0
"""From rollouts to a training batch: score, pack, advantages, and what is logged about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.advantages import ADVANTAGE_ESTIMATORS
from megatron_rl.algorithms.aggregation import compute_sequence_weights
from megatron_rl.algorithms.mismatch import finish_mismatch, sum_mismatch
from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.data.batching import PackedSequence, TrainBatch, build_train_batch, expand_to_tokens
from megatron_rl.data.packing import packing_metrics, plan_microbatches
from megatron_rl.parallel.collectives import raise_together, reduce_scalars
from megatron_rl.rewards.scoring import RewardFunction, score_rollouts
from megatron_rl.training.policy import Policy
from megatron_rl.types import Rollout, RolloutGroup


def rollouts_of(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    """All rollouts of a step; their index in this list is their identity in the batch."""
    return [rollout for group in groups for rollout in group.rollouts]


def score_groups(
    groups: Sequence[RolloutGroup], function: RewardFunction, decode: Callable[[Sequence[int]], str],
    group: dist.ProcessGroup,
) -> None:
    """Fill in response text and reward; each rank scores its share; collective.

    Raises:
        UserError: the reward function failed on some rank; raised on all of them.
    """
    rollouts, rank, world = rollouts_of(groups), group.rank(), group.size()
    mine, error = rollouts[rank::world], None
    try:
        score_rollouts(mine, function, decode)
    except Exception as caught:  # the other ranks must learn of it before they wait for this one
        error = caught
    raise_together(error, group)
    shares: list[Any] = [None] * world
    dist.all_gather_object(shares, [(r.response, r.reward, r.reward_components) for r in mine], group=group)
    for peer, share in enumerate(shares):
        for rollout, scored in zip(rollouts[peer::world], share, strict=True):
            rollout.response, rollout.reward, rollout.reward_components = scored


def pack_groups(
    groups: Sequence[RolloutGroup], plan: BatchPlan, algorithm: AlgorithmConfig, actor: Policy, device: torch.device
) -> tuple[TrainBatch, dict[str, float]]:
    """Pack the rollouts into the microbatches of this rank's DP replica, minibatch by minibatch.

    Returns:
        The batch, and packing metrics averaged over minibatches.
    """
    sequences = [
        PackedSequence(np.concatenate([r.prompt.tokens, r.response_tokens]), len(r.prompt.tokens), r.rollout_logprobs)
        for r in rollouts_of(groups)
    ]
    weights, plans, metrics = [], [], []
    for first in range(0, len(sequences), plan.rollouts_per_minibatch):
        part = sequences[first : first + plan.rollouts_per_minibatch]
        lengths = [len(s.tokens) for s in part]
        layout = plan_microbatches(
            lengths, dp_size=plan.dp_size, max_tokens=plan.max_tokens_per_microbatch,
            count_multiple=actor.microbatch_count_multiple)
        plans.append((range(first, first + len(part)), layout))
        weights.append(compute_sequence_weights(
            algorithm.loss_agg_mode, [len(s.tokens) - s.num_prompt_tokens for s in part], plan.max_response_length))
        metrics.append(packing_metrics(layout, lengths, plan.max_tokens_per_microbatch))
    batch = build_train_batch(
        sequences, np.concatenate(weights), plans, dp_rank=actor.groups.at.dp, pad_multiple=actor.pad_multiple,
        device=device)
    return batch, {key: float(np.mean([m[key] for m in metrics])) for key in metrics[0]}


def compute_advantages(
    groups: Sequence[RolloutGroup], batch: TrainBatch, algorithm: AlgorithmConfig
) -> torch.Tensor:
    """One advantage per rollout from the rewards of its group, given to all of its tokens, [t]."""
    rewards = [[rollout.reward for rollout in group.rollouts] for group in groups]
    return expand_to_tokens(ADVANTAGE_ESTIMATORS[algorithm.adv_estimator](rewards, algorithm), batch)


def measure_mismatch(batch: TrainBatch, group: dist.ProcessGroup) -> dict[str, float]:
    """Gap between `old_logprobs` and the engine's `rollout_logprobs`; collective over DP."""
    sums, maximum = sum_mismatch(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask)
    device = batch.tokens.device
    sums = reduce_scalars(sums, dist.ReduceOp.SUM, group, device)
    maxima = reduce_scalars({"max": maximum}, dist.ReduceOp.MAX, group, device)
    return finish_mismatch(sums, maxima["max"])


def describe_rollouts(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Reward and length metrics of one step."""
    rollouts = rollouts_of(groups)
    components = sorted({name for r in rollouts for name in r.reward_components})
    spreads = [np.ptp([r.reward for r in group.rollouts]) for group in groups]
    return {
        "reward/mean": float(np.mean([r.reward for r in rollouts])),
        **{f"reward/{name}": float(np.mean([r.reward_components.get(name, 0.0) for r in rollouts]))
           for name in components},
        "reward/uninformative_groups": float(np.mean([spread == 0 for spread in spreads])),
        "response/truncated": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        "tokens/prompt": float(sum(len(r.prompt.tokens) for r in rollouts)),
        "tokens/response": float(sum(len(r.response_tokens) for r in rollouts)),
    }


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    """One rollout as it is written to rollouts/step_<N>.jsonl."""
    return {
        "prompt_id": rollout.prompt.prompt_id, "sample_index": rollout.sample_index, "prompt": rollout.prompt.text,
        "response": rollout.response, "ground_truth": rollout.prompt.ground_truth, "reward": rollout.reward,
        "reward_components": rollout.reward_components, "finish_reason": rollout.finish_reason,
        "policy_version": rollout.policy_version, "tokens": rollout.response_tokens.tolist(),
        "rollout_logprobs": [round(float(x), 6) for x in rollout.rollout_logprobs],
    }
