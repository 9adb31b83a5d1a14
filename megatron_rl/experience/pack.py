# SPDX-License-Identifier: Apache-2.0
"""From rollouts to the packed microbatches of a role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from megatron_rl.algorithms.aggregation import compute_sequence_weights
from megatron_rl.algorithms.ledger import build_ledger
from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.options import find_options
from megatron_rl.config.schema import AlgorithmConfig, LayoutConfig
from megatron_rl.config.sft_plan import SftPlan
from megatron_rl.experience.collected import number_groups
from megatron_rl.packing.batch import TrainBatch, build_train_batch
from megatron_rl.packing.buckets import Buckets, padding_metrics
from megatron_rl.packing.microbatches import microbatch_sizes, packing_metrics, plan_microbatches
from megatron_rl.packing.prefix import SharedPrompts
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.types import Branch, Rollout


class PackedRole(Protocol):
    """What packing asks of a role's `PackedModel`."""

    groups: ParallelGroups
    buckets: Buckets | None
    pad_multiple: int
    attention_ratio: float
    microbatch_count_multiple: int


def pack_rollouts(
    rollouts: Sequence[Rollout], plan: BatchPlan | SftPlan, algorithm: AlgorithmConfig, role: PackedRole,
    config: LayoutConfig, device: torch.device,
) -> tuple[TrainBatch, dict[str, float]]:
    """Pack the rollouts into the microbatches of this rank's DP replica of a role, minibatch by minibatch.

    Args:
        rollouts: of the step.
        plan: batch arithmetic.
        algorithm: aggregation, and whether truncated responses enter the loss.
        role: whose layout decides.
        config: the role's token budget, and whether the responses to a prompt share it.
        device: where the tensors live.

    Returns:
        The batch, and packing metrics averaged over minibatches (padding by bucket: over the whole step).
    """
    sequences = [_find_branch(rollout, algorithm) for rollout in rollouts]
    weights, plans, metrics, ledgers, sizes = [], [], [], [], []
    group_of = number_groups(rollouts) if config.share_prompts else None
    constant = algorithm.loss_scale_factor or plan.max_response_length
    options = find_options(algorithm, algorithm.loss_agg_mode)
    for first in range(0, len(sequences), plan.rollouts_per_minibatch):
        part = sequences[first : first + plan.rollouts_per_minibatch]
        lengths = [len(s.tokens) for s in part]
        shared = group_of and SharedPrompts(
            group_of[first : first + len(part)], [s.num_prompt_tokens for s in part])
        layout = plan_microbatches(
            lengths, dp_size=role.groups.layout.dp_size, max_tokens=config.max_tokens_per_microbatch,
            count_multiple=role.microbatch_count_multiple, attention_ratio=role.attention_ratio, shared=shared)
        plans.append((range(first, first + len(part)), layout))
        in_loss = [s.num_loss_tokens for s in part]
        weights.append(compute_sequence_weights(algorithm.loss_agg_mode, in_loss, constant, options))
        ledgers.append(build_ledger(algorithm.loss_agg_mode, in_loss, constant, options))
        metrics.append(packing_metrics(
            layout, lengths, config.max_tokens_per_microbatch, pad_multiple=role.pad_multiple,
            attention_ratio=role.attention_ratio, shared=shared, buckets=role.buckets))
        sizes += microbatch_sizes(layout, lengths, shared)
    batch = build_train_batch(
        sequences, np.concatenate(weights), plans, dp_rank=role.groups.at.dp, pad_multiple=role.pad_multiple,
        device=device, group_of=group_of, buckets=role.buckets, max_seqlen=plan.longest_sequence)
    batch.ledgers = ledgers
    batch.names = [f"prompt_id {r.prompt.prompt_id}, sample {r.sample_index}" for r in rollouts]
    padding = padding_metrics((size, role.buckets.find_size(size)) for size in sizes) if role.buckets else {}
    return batch, {key: float(np.mean([m[key] for m in metrics])) for key in metrics[0]} | padding


def _find_branch(rollout: Rollout, algorithm: AlgorithmConfig) -> Branch:
    """The one branch of a rollout; without tokens in the loss where a truncated one is masked."""
    [branch] = rollout.branches
    is_masked = algorithm.mask_truncated and rollout.finish_reason == "length"
    return replace(branch, sampled=np.zeros_like(branch.sampled)) if is_masked else branch
