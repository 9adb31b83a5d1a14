# SPDX-License-Identifier: Apache-2.0
"""What is logged about the rollouts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rl.experience.collected import rollouts_of
from megatron_rl.observability.rollout_log import TokenTexts, as_numbers, token_fields
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.types import Rollout, RolloutGroup


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
