# SPDX-License-Identifier: Apache-2.0
"""KL, advantages, metrics, distributions and logged rows of a step's rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms import advantages as estimation
from megatron_rl.algorithms.catalog import CHOOSES_TOKENS, has_importance_weights
from megatron_rl.algorithms.losses import find_clipped
from megatron_rl.algorithms.plugin_types import PolicyLossInputs
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.observability.metrics import NUM_BEST, TokenTexts, as_numbers, token_fields
from megatron_rl.parallel.collectives import reduce_scalars
from megatron_rl.rewards.answers import RESTATES
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.samples.experience import Experience, find_runs
from megatron_rl.samples.table import FINISH_REASONS, Headers
from megatron_rl.types import SERVICE_FAILURES, Rollout


def measure_kl(headers: Headers, batch: TrainBatch, kl_type: str, group: dist.ProcessGroup) -> np.ndarray:
    """Compute the KL of each rollout, summed over its loss tokens, [num_rollouts]; collective, equal on every rank."""
    kl = _compute_kl(batch, kl_type).double()
    per_rollout = torch.zeros(len(headers.rollouts) + 1, dtype=torch.float64, device=kl.device)
    per_rollout.index_add_(0, find_rollouts(headers, batch), kl)  # padding (-1) is added to the last entry
    dist.all_reduce(per_rollout, group=group)
    return per_rollout[:-1].cpu().numpy()


def _compute_kl(batch: TrainBatch, kl_type: str) -> torch.Tensor:
    from megatron_rl.algorithms.kl import compute_kl

    kl = compute_kl(batch.column("old_logprobs"), batch.column("ref_logprobs"), kl_type)
    return torch.where(batch.loss_mask, kl, 0.0)


def find_rollouts(headers: Headers, batch: TrainBatch) -> torch.Tensor:
    """Return the rollout index of each token, [t] int64; padding has the number of rollouts as index."""
    table = torch.from_numpy(np.append(headers["rollout"], len(headers.rollouts)).astype(np.int64))
    return table.to(batch.sequence_ids.device)[batch.sequence_ids]


def compute_advantages(
    samples: Experience,
    batch: TrainBatch,
    algorithm: AlgorithmConfig,
    group: dist.ProcessGroup,
    turn_rewards: torch.Tensor | None = None,
) -> estimation.Advantages:
    """Compute the advantages (with a critic, also the returns) of this rank's tokens; collective.

    Args:
        batch: with old log-probs, and reference log-probs and values if there are any.
    """
    headers = samples.headers
    rewards = samples.rewards
    kl, scores = None, rewards
    if samples.kl_per_rollout is not None and algorithm.kl_in == "reward":
        kl = _compute_kl(batch, algorithm.kl_type)
        scores = rewards - algorithm.kl_coef * samples.kl_per_rollout
    inputs = estimation.AdvantageInputs(
        scores=scores,
        group_sizes=headers.group_sizes,
        baselines=samples.baselines,
        token_rewards=estimation.compute_token_rewards(
            headers["reward"] - headers["earlier_reward"],
            kl,
            algorithm.kl_coef,
            batch.loss_mask,
            batch.sequence_ids,
            turn_rewards,
        ),
        values=batch.values,
        loss_mask=batch.loss_mask,
        sequence_ids=batch.sequence_ids,
        rollout_ids=find_rollouts(headers, batch),
        group=group,
        old_logprobs=batch.old_logprobs,
        sum_pi_squared=batch.sum_pi_squared,
        importance_weights=batch.importance_weights,
        components=dict(zip(headers.names, headers.rollouts.components.T, strict=True)),
        has_reward=headers.rollouts.has_reward,
    )
    found = estimation.compute_advantages(inputs, algorithm)
    if batch.teacher_logprobs is None:
        return found
    lesson = algorithm.distillation.coef * (batch.teacher_logprobs - batch.column("old_logprobs"))
    return replace(found, advantages=found.advantages + torch.where(batch.loss_mask, lesson, 0.0))


def sum_mismatch(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[dict[str, float], float]:
    """Sum this rank's terms of the mismatch metrics over its tokens in the loss.

    Returns:
        Sums, to be added over DP ranks for `finish_mismatch`, and the maximum of |old_logprobs - rollout_logprobs|.
    """
    d = (old_logprobs - rollout_logprobs)[loss_mask].double()
    w = d.exp()
    sums = {"abs": d.abs().sum(), "k3": (torch.expm1(d) - d).sum(), "w": w.sum(), "w2": w.square().sum()}
    maximum = float(d.abs().max()) if len(d) else 0.0
    return {**{k: float(v) for k, v in sums.items()}, "tokens": float(d.numel())}, maximum


def finish_mismatch(sums: dict[str, float], maximum: float) -> dict[str, float]:
    """Compute the metrics `mismatch/*` from the sums and the maximum over all ranks.

    With d = old_logprobs - rollout_logprobs and w = exp(d), k3 is the mean of w - 1 - d, an estimate of
    KL(rollout || trainer), and the effective sample size (sum w)^2 / (N sum w^2), 1 if all weights are equal.
    """
    tokens = max(sums["tokens"], 1.0)
    return {
        "mismatch/max": maximum,
        "mismatch/mean": sums["abs"] / tokens,
        "mismatch/k3": sums["k3"] / tokens,
        "mismatch/effective_sample_size": sums["w"] ** 2 / (tokens * sums["w2"]) if sums["w2"] else 1.0,
    }


def correct_mismatch(
    headers: Headers, batch: TrainBatch, algorithm: AlgorithmConfig, group: dist.ProcessGroup
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Measure the mismatch between `old_logprobs` and the engine's log-probs; collective.

    Returns:
        Correcting importance weights [t] or `None`, and the metrics `mismatch/...`.
    """
    device = batch.tokens.device
    sums, maximum = sum_mismatch(batch.column("old_logprobs"), batch.rollout_logprobs, batch.loss_mask)
    sums = reduce_scalars(sums, dist.ReduceOp.SUM, group, device)
    maxima = reduce_scalars({"max": maximum}, dist.ReduceOp.MAX, group, device)
    metrics = finish_mismatch(sums, maxima["max"])
    if not has_importance_weights(algorithm):
        return None, metrics
    from megatron_rl.samples.corrections import weigh_tokens

    weights, further = weigh_tokens(headers, batch, find_rollouts(headers, batch), algorithm, group)
    return weights, metrics | further


def choose_tokens(batch: TrainBatch, algorithm: AlgorithmConfig, group: dist.ProcessGroup) -> torch.Tensor | None:
    """Return the tokens that the loss clip_cov or kl_cov treats specially, `None` for other losses; collective."""
    if algorithm.policy_loss not in CHOOSES_TOKENS:
        return None
    from megatron_rl.algorithms import policy_losses

    return policy_losses.choose_tokens(loss_inputs(batch), algorithm, group)


def loss_inputs(batch: TrainBatch) -> PolicyLossInputs:
    """Build the inputs of the policy loss before the update."""
    old_logprobs = batch.column("old_logprobs")
    return PolicyLossInputs(
        old_logprobs, old_logprobs, batch.column("advantages"), batch.loss_mask, batch.sequence_ids, batch.chosen
    )


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
