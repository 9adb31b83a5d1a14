# SPDX-License-Identifier: Apache-2.0
"""Metrics, distributions and logged rows of a step's rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_rl.algorithms.losses import find_clipped
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.observability.rollout_log import NUM_BEST, TokenTexts, as_numbers, token_fields
from megatron_rl.rewards.answers import RESTATES
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.samples.estimate import loss_inputs
from megatron_rl.samples.experience import Experience, find_runs
from megatron_rl.samples.table import FINISH_REASONS, Headers
from megatron_rl.types import SERVICE_FAILURES, Rollout


def describe_rollouts(headers: Headers) -> dict[str, float]:
    """Compute the reward and length metrics of one step, averaged over (rewarded) rollouts; `tokens/...` are sums."""
    rollouts = headers.rollouts
    groups, everywhere = headers.split_rewarded(rollouts["reward"]), np.ones(len(rollouts), bool)
    components = {
        name: np.nan_to_num(rollouts.component(name))[everywhere if name == SERVICE_FAILURES else rollouts.has_reward]
        for name in sorted(headers.names)
    }
    return {
        "reward/mean": _mean(np.concatenate(groups)),
        f"reward/{RESTATES}": 0.0,  # default, replaced below if a rollout has the component
        **{f"reward/{name}": _mean(values) for name, values in components.items()},
        "reward/uninformative_groups": float(np.mean([not len(rewards) or np.ptp(rewards) == 0 for rewards in groups])),
        "response/truncated": float(np.mean(rollouts["finish_reason"] == FINISH_REASONS.index("length"))),
        "tokens/prompt": float(rollouts["num_prompt_tokens"].sum()),
        "tokens/response": float(headers.num_response_tokens.sum()),
    }


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def describe_staleness(headers: Headers, version: int, optimizer_steps: int) -> dict[str, float]:
    """Compute the staleness of the rollouts in steps of the main loop, from the first policy version of each.

    Args:
        optimizer_steps: optimizer steps per step of the main loop.
    """
    staleness = (version - headers.rollouts["first_version"]) / optimizer_steps
    return {"schedule/staleness_mean": float(staleness.mean()), "schedule/staleness_max": float(staleness.max())}


def describe_sources(headers: Headers, sources: Sequence[str]) -> dict[str, float]:
    """Compute the mean reward of each data source, if a step has more than one.

    Args:
        sources: [num_groups].
    """
    names, groups = np.array(sources), headers.split_rewarded(headers.rollouts["reward"])
    names, rewards = np.repeat(names, [len(group) for group in groups]), np.concatenate(groups)
    known = sorted(set(sources))
    return {f"reward/{name}/mean": _mean(rewards[names == name]) for name in known} if len(known) > 1 else {}


def describe_distributions(headers: Headers, batch: TrainBatch) -> dict[str, np.ndarray]:
    """Return distributions of one step, for histograms.

    Response length and reward cover all (rewarded) rollouts; advantage and log-prob gap (trainer's minus engine's)
    cover the loss tokens of this DP replica.
    """
    gap = batch.column("old_logprobs") - batch.rollout_logprobs
    return {
        "distribution/response_length": headers.sum_per_rollout(headers.num_response_tokens),
        "distribution/reward": headers.rollouts["reward"][headers.rollouts.has_reward],
        "distribution/advantage": batch.column("advantages")[batch.loss_mask].float().cpu().numpy(),
        "distribution/logprob_gap": gap[batch.loss_mask].float().cpu().numpy(),
    }


def describe_updates(batch: TrainBatch, algorithm: AlgorithmConfig) -> dict[str, torch.Tensor]:
    """Return `ratio`, `entropy`, `clipped` of each token's last update, [t] float32 (NaN: none); {} if unrecorded."""
    now = batch.update_logprobs
    if now is None:
        return {}
    if not len(now):  # the actor is on other ranks
        return dict.fromkeys(("ratio", "entropy", "clipped"), now)
    inputs = replace(loss_inputs(batch), logprobs=now)
    if algorithm.importance_sampling == "bypass":
        inputs = replace(inputs, old_logprobs=batch.rollout_logprobs)
    clipped = find_clipped(inputs, algorithm)
    return {
        "ratio": (now - inputs.old_logprobs).exp(),
        "entropy": batch.column("update_entropy"),
        "clipped": torch.where(now.isnan(), now, clipped.float()),
    }


def choose_logged(headers: Headers, num_groups: int, step: int) -> dict[int, dict[str, str]]:
    """Choose the rollouts of a step to log: whole groups, and the three best, the worst and the longest rollout.

    Args:
        num_groups: groups to log, spread over the batch and rotated by step; -1 for all, 0 logs nothing.

    Returns:
        Additional fields of each row by ascending rollout index: `logged_as` marks extremes, which are no fair sample.
    """
    total = len(headers.group_sizes)
    wanted = total if num_groups < 0 else min(num_groups, total)
    if not wanted:
        return {}
    lengths, rewards = headers.sum_per_rollout(headers.num_response_tokens), headers.rollouts["reward"]
    scored = np.flatnonzero(headers.rollouts.has_reward)
    best = scored[np.lexsort((headers.rollouts["sample_index"][scored], -rewards[scored]))][:NUM_BEST]
    extremes = dict.fromkeys(best.tolist(), "best")
    if len(scored):
        extremes[int(scored[rewards[scored].argmin()])] = "worst"
    extremes[int(lengths.argmax())] = "longest"
    found = {number: {"logged_as": name} for number, name in extremes.items()}
    groups = (np.arange(wanted) * total // wanted + step) % total
    found |= {number: {} for number in np.flatnonzero(np.isin(headers.rollouts["group"], groups)).tolist()}
    return dict(sorted(found.items()))


def rollout_row(rollout: Rollout, token_texts: TokenTexts, values: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Build the row of one rollout in rollouts/step_<N>.jsonl.

    Args:
        values: values of its loss tokens by name.
    """
    turns, branch = {}, rollout.branches[0]
    if len(rollout.branches) > 1 or branch.rewards is not None or not branch.sampled[branch.num_prompt_tokens :].all():
        from megatron_rl.samples.branches import describe_turns

        turns = describe_turns(rollout, find_runs(rollout.branches), token_texts)
    return text_row(rollout) | {
        "versions": rollout.versions.tolist(),
        "tokens": rollout.response_tokens.tolist(),
        "token_texts": token_texts(rollout.response_tokens.tolist()),
        **turns,
        "rollout_logprobs": as_numbers(rollout.rollout_logprobs),
        **token_fields(len(rollout.response_tokens), values),
    }


def text_rows(parts: Iterable[Experience], decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """Return a `text_row` for each rollout of a validation set, on rank 0 only; collective."""
    found = (part.fetch_rollouts(range(len(part.rewards)), decode) for part in parts)
    return [text_row(rollout) for rollouts in found for rollout, _ in rollouts]


def text_row(rollout: Rollout) -> dict[str, Any]:
    """Build the row of one rollout without tokens, as in validation files."""
    return {
        "prompt_id": rollout.prompt.prompt_id,
        "sample_index": rollout.sample_index,
        "prompt": rollout.prompt.text,
        "response": rollout.response,
        "num_tokens": len(rollout.response_tokens),
        "ground_truth": rollout.prompt.ground_truth,
        "reward": rollout.reward,
        "reward_components": rollout.reward_components,
        "finish_reason": rollout.finish_reason,
        "policy_version": rollout.policy_version,
    }
