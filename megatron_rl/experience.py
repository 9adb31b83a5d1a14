# SPDX-License-Identifier: Apache-2.0
"""From scored rollouts to training batches: pack, KL, advantages, and what is logged about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms import advantages as estimation
from megatron_rl.algorithms import covariance
from megatron_rl.algorithms.aggregation import compute_sequence_weights
from megatron_rl.algorithms.kl import compute_kl_penalty
from megatron_rl.algorithms.ledger import build_ledger
from megatron_rl.algorithms.losses import PolicyLossInputs, find_clipped
from megatron_rl.algorithms.mismatch import (
    compute_importance_weights,
    finish_importance_weights,
    finish_mismatch,
    normalize_weights,
    sum_mismatch,
)
from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.schema import AlgorithmConfig, LayoutConfig
from megatron_rl.config.sft_plan import SftPlan
from megatron_rl.data.batching import PackedSequence, TrainBatch, build_train_batch
from megatron_rl.data.buckets import padding_metrics
from megatron_rl.data.packing import microbatch_sizes, packing_metrics, plan_microbatches
from megatron_rl.data.prefix import SharedPrompts
from megatron_rl.observability.rollout_log import TokenTexts, as_numbers, token_fields
from megatron_rl.parallel.collectives import gather_arrays, reduce_scalars
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.types import Rollout, RolloutGroup


@dataclass(frozen=True)
class Collected:
    """The scored rollouts of one step, the same on every rank.

    Attributes:
        groups: one per prompt.
        baselines: reward of the greedy response to each prompt (ReMax), or None.
        metrics: about sampling.
    """

    groups: list[RolloutGroup]
    baselines: np.ndarray | None
    metrics: dict[str, float]

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts; their index in this list is their identity in the batch."""
        return rollouts_of(self.groups)


def rollouts_of(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    """All rollouts of some groups, in order."""
    return [rollout for group in groups for rollout in group.rollouts]


def pack_rollouts(
    rollouts: Sequence[Rollout], plan: BatchPlan | SftPlan, algorithm: AlgorithmConfig, role: PackedModel,
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
    sequences = [_pack_sequence(rollout, algorithm) for rollout in rollouts]
    weights, plans, metrics, ledgers, sizes = [], [], [], [], []
    group_of = number_groups(rollouts) if config.share_prompts else None
    constant = algorithm.loss_scale_factor or plan.max_response_length
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
        weights.append(compute_sequence_weights(algorithm.loss_agg_mode, in_loss, constant))
        ledgers.append(build_ledger(algorithm.loss_agg_mode, in_loss, constant))
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


def number_groups(rollouts: Sequence[Rollout]) -> list[int]:
    """A number per rollout that those of one group, which follow each other, have in common."""
    starts = [i == 0 or rollout.prompt is not rollouts[i - 1].prompt for i, rollout in enumerate(rollouts)]
    return np.cumsum(starts).tolist()


def _pack_sequence(rollout: Rollout, algorithm: AlgorithmConfig) -> PackedSequence:
    is_masked = algorithm.mask_truncated and rollout.finish_reason == "length"
    return PackedSequence(
        np.concatenate([rollout.prompt.tokens, rollout.response_tokens]), len(rollout.prompt.tokens),
        rollout.rollout_logprobs, in_loss=not is_masked)


def move_tokens(
    values: torch.Tensor, source: TrainBatch, destination: TrainBatch, is_owner: bool, group: dist.ProcessGroup
) -> torch.Tensor:
    """Bring values of the tokens in the loss from one role's packing into another's; collective over `group`.

    Args:
        values: [t] float32 in the packing of `source`.
        source, destination: batches of the same rollouts, each in a layout of its own.
        is_owner: exactly one rank of each DP replica of the source's role says True.
        group: all ranks of the job.

    Returns:
        [t] float32 in the packing of `destination`; 0 outside of the loss.
    """
    if source is destination:
        return values
    mask = source.loss_mask
    ids = gather_arrays([source.sequence_ids[mask].cpu().numpy()] if is_owner else [], np.int64, group)
    numbers = gather_arrays([values[mask].cpu().numpy()] if is_owner else [], np.float32, group)
    all_ids, all_numbers = (np.concatenate([x for rank in side for x in rank]) for side in (ids, numbers))
    places = destination.loss_mask.nonzero()[:, 0].cpu().numpy()
    wanted = destination.sequence_ids.cpu().numpy()[places]
    # Tokens of a rollout keep their order, so sorting both sides by rollout pairs them up.
    here, there = np.argsort(wanted, kind="stable"), np.argsort(all_ids, kind="stable")
    there = there[np.isin(all_ids[there], wanted)]
    assert np.array_equal(wanted[here], all_ids[there]), "both batches must hold the same tokens of the same rollouts"
    result = np.zeros(len(destination.tokens), np.float32)
    result[places[here]] = all_numbers[there]
    return torch.from_numpy(result).to(destination.tokens.device)


def measure_kl(
    batch: TrainBatch, num_rollouts: int, kl_type: str, group: dist.ProcessGroup
) -> tuple[np.ndarray, np.ndarray]:
    """KL of each rollout, summed over its tokens in the loss, and their number; the same on every rank; collective."""
    kl = compute_kl_penalty(batch.old_logprobs, batch.ref_logprobs, batch.loss_mask, kl_type).double()
    per_rollout = torch.zeros(num_rollouts + 1, 2, dtype=torch.float64, device=kl.device)
    places = batch.sequence_ids % (num_rollouts + 1)  # padding (-1) falls into the last entry
    per_rollout.index_add_(0, places, torch.stack([kl, batch.loss_mask.double()], dim=1))
    dist.all_reduce(per_rollout, group=group)
    kl_sums, tokens = per_rollout[:-1].T.cpu().numpy()
    return kl_sums, tokens


def compute_advantages(
    collected: Collected, batch: TrainBatch, algorithm: AlgorithmConfig, kl_per_rollout: np.ndarray | None,
    group: dist.ProcessGroup,
) -> estimation.Advantages:
    """Advantages (and returns, with a critic) of this rank's tokens; collective over `group`.

    Args:
        collected: rewards of all rollouts.
        batch: old log-probs, reference log-probs and values where there are any.
        algorithm: the estimator, with the current KL coefficient.
        kl_per_rollout: from `measure_kl`, where the KL term is in the reward.
        group: the actor's DP group.
    """
    rewards = np.array([rollout.reward for rollout in collected.rollouts], np.float64)
    kl, scores = None, rewards
    if kl_per_rollout is not None and algorithm.kl_in == "reward":
        kl = compute_kl_penalty(batch.old_logprobs, batch.ref_logprobs, batch.loss_mask, algorithm.kl_type)
        scores = rewards - algorithm.kl_coef * kl_per_rollout
    inputs = estimation.AdvantageInputs(
        scores=scores, group_sizes=np.array([g.group_size for g in collected.groups]),
        baselines=collected.baselines,
        token_rewards=estimation.compute_token_rewards(
            rewards, kl, algorithm.kl_coef, batch.loss_mask, batch.sequence_ids),
        values=batch.values, loss_mask=batch.loss_mask, sequence_ids=batch.sequence_ids, group=group,
        old_logprobs=batch.old_logprobs, sum_pi_squared=batch.sum_pi_squared,
        importance_weights=batch.importance_weights)
    return estimation.compute_advantages(inputs, algorithm)


def correct_mismatch(
    batch: TrainBatch, algorithm: AlgorithmConfig, group: dist.ProcessGroup
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Gap between `old_logprobs` and the engine's log-probs, and the weights that correct for it; collective.

    Returns:
        Importance weights [t] or None, and the metrics `mismatch/...`.
    """
    device = batch.tokens.device
    sums, maximum = sum_mismatch(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask)
    weights, counts = compute_importance_weights(
        batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask, batch.sequence_ids, algorithm)
    sums, counts = (reduce_scalars(part, dist.ReduceOp.SUM, group, device) for part in (sums, counts))
    if weights is not None and algorithm.importance_normalize:
        weights = normalize_weights(weights, counts)
    maxima = reduce_scalars({"max": maximum}, dist.ReduceOp.MAX, group, device)
    return weights, finish_mismatch(sums, maxima["max"]) | finish_importance_weights(counts)


def choose_tokens(batch: TrainBatch, algorithm: AlgorithmConfig, group: dist.ProcessGroup) -> torch.Tensor | None:
    """The tokens that the policy loss treats in another way, where it does that; collective."""
    return covariance.choose_tokens(_loss_inputs(batch), algorithm, group)


def _loss_inputs(batch: TrainBatch) -> PolicyLossInputs:
    """The tokens of a batch, with the log-probs from before the update."""
    return PolicyLossInputs(
        batch.old_logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask, batch.sequence_ids, batch.chosen)


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


def describe_distributions(rollouts: Sequence[Rollout], batch: TrainBatch) -> dict[str, np.ndarray]:
    """Distributions of one step, for histograms.

    Returns:
        Of all rollouts [num_rollouts]: length and reward. Of the tokens in the loss in this rank's batch, its DP
        replica's share of them: the advantage, and the trainer's log-prob before the update minus the engine's.
    """
    gap = batch.old_logprobs - batch.rollout_logprobs
    return {
        "distribution/response_length": np.array([len(r.response_tokens) for r in rollouts]),
        "distribution/reward": np.array([r.reward for r in rollouts]),
        "distribution/advantage": batch.advantages[batch.loss_mask].float().cpu().numpy(),
        "distribution/logprob_gap": gap[batch.loss_mask].float().cpu().numpy(),
    }


def gather_token_values(
    batch: TrainBatch, num_rollouts: int, algorithm: AlgorithmConfig, is_owner: bool, group: dist.ProcessGroup
) -> list[dict[str, np.ndarray]]:
    """What the step knew of each token of its first rollouts, for the rollout log; collective over `group`.

    Args:
        batch: of this rank, after its updates.
        num_rollouts: how many rollouts.
        algorithm: says which tokens are clipped.
        is_owner: one rank of each DP replica says True: of the last pipeline stage, where the updates are recorded.
        group: all ranks of the job.

    Returns:
        One dict per rollout, the same on every rank: name -> [number of its tokens in the loss] float32, with names
        `old_logprobs`, `advantages`; with a critic `values`; where updates are recorded `ratio`, `clipped` and
        `entropy` of the last one, NaN before the first.
    """
    return gather_columns(_token_columns(batch, algorithm), batch, num_rollouts, is_owner, group)


def gather_columns(
    columns: Mapping[str, torch.Tensor], batch: TrainBatch, num_rollouts: int, is_owner: bool,
    group: dist.ProcessGroup,
) -> list[dict[str, np.ndarray]]:
    """Values of the tokens in the loss by rollout and token, whatever the packing; collective over `group`.

    Args:
        columns: name -> [t] in the packing of `batch`; the same names on every rank.
        batch: of this rank.
        num_rollouts: how many rollouts are wanted, the first ones.
        is_owner: one rank of each DP replica says True.
        group: all ranks of the job.

    Returns:
        One dict per rollout, the same on every rank: name -> [number of its tokens in the loss] float32.
    """
    wanted = batch.loss_mask & (batch.sequence_ids < num_rollouts)
    ids = gather_arrays([batch.sequence_ids[wanted].cpu().numpy()] if is_owner else [], np.int64, group)
    numbers = gather_arrays(
        [column[wanted].cpu().numpy() for column in columns.values()] if is_owner else [], np.float32, group)
    all_ids = np.concatenate([x for rank in ids for x in rank])
    table = np.concatenate([np.stack(rank) for rank in numbers if rank], axis=1)  # [num_columns, tokens]
    order = np.argsort(all_ids, kind="stable")  # tokens of a rollout keep their order
    bounds = np.searchsorted(all_ids[order], np.arange(num_rollouts + 1))
    return [dict(zip(columns, table[:, order[start:stop]], strict=True)) for start, stop in pairwise(bounds)]


def _token_columns(batch: TrainBatch, algorithm: AlgorithmConfig) -> dict[str, torch.Tensor]:
    columns = {"old_logprobs": batch.old_logprobs, "advantages": batch.advantages, "values": batch.values}
    now = batch.update_logprobs
    if now is not None:
        clipped = find_clipped(
            replace(_loss_inputs(batch), logprobs=now), algorithm)
        columns |= {"ratio": (now - batch.old_logprobs).exp(), "entropy": batch.update_entropy,
                    "clipped": torch.where(now.isnan(), now, clipped.float())}
    return {name: column for name, column in columns.items() if column is not None}


def rollout_row(rollout: Rollout, token_texts: TokenTexts, values: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """One rollout as it is written to rollouts/step_<N>.jsonl.

    Args:
        rollout: scored.
        token_texts: of the tokenizer.
        values: of its tokens, from `gather_token_values`.
    """
    return {
        "prompt_id": rollout.prompt.prompt_id, "sample_index": rollout.sample_index, "prompt": rollout.prompt.text,
        "response": rollout.response, "ground_truth": rollout.prompt.ground_truth, "reward": rollout.reward,
        "reward_components": rollout.reward_components, "finish_reason": rollout.finish_reason,
        "policy_version": rollout.policy_version, "tokens": rollout.response_tokens.tolist(),
        "token_texts": token_texts(rollout.response_tokens),
        "rollout_logprobs": as_numbers(rollout.rollout_logprobs),
        **token_fields(len(rollout.response_tokens), values),
    }
