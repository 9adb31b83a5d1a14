# SPDX-License-Identifier: Apache-2.0
"""The built-in advantage estimators besides GRPO (`advantages.py`), loaded when `algorithm.adv_estimator` names one.

With a baseline of the group, groups of equal rewards and of one have advantages of exactly 0. Arithmetic is float64,
results are float32.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.advantages import (
    STD_EPSILON,
    AdvantageInputs,
    Advantages,
    centre,
    centre_scores,
    compute_grpo_advantages,
)
from megatron_rl.algorithms.losses import mark_first
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.types import UserError

_VARIANCE_EPSILON = 1e-8
_WEIGHT_EPSILON = 1e-8


def compute_dr_grpo_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Compute A_i = r_i - mean(r) of the group (Dr. GRPO, arXiv 2503.20783); the paper aggregates by `constant`."""
    return inputs.expand(centre_scores(inputs))


def compute_rloo_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Compute REINFORCE leave-one-out advantages (arXiv 2402.14740).

    A_i = r_i - mean_{j != i} r_j = n / (n - 1) (r_i - mean(r))
    """
    return inputs.expand(np.concatenate([centre(r) * len(r) / max(len(r) - 1, 1) for r in inputs.grouped_scores()]))


def compute_grpo_passk_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Compute the pass@k policy gradient (arXiv 2503.19595): only a group's best response has an advantage.

        A_best = (r_best - r_second) / (std(r) + 1e-6), all other A_i = 0

    Not divided if `norm_adv_by_std=False`.
    """
    found = []
    for scores in inputs.grouped_scores():
        found.append(np.zeros(len(scores)))
        if len(scores) > 1:
            *_, second, best = np.sort(scores)
            std = scores.std(ddof=1) + STD_EPSILON if config.norm_adv_by_std else 1.0
            found[-1][scores.argmax()] = (best - second) / std
    return inputs.expand(np.concatenate(found))


def compute_opo_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Compute advantages with the length-weighted optimal baseline (arXiv 2505.23585).

        A_i = r_i - sum_j l_j r_j / sum_j l_j           l_j the tokens of response j in the loss

    Collective: lengths are counted over all ranks.
    """
    counts = torch.zeros(len(inputs.scores), dtype=torch.float64, device=inputs.loss_mask.device)
    ids = inputs.find_rollouts()[inputs.loss_mask]
    counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float64))
    dist.all_reduce(counts, group=inputs.group)
    lengths = np.split(counts.cpu().numpy(), np.cumsum(inputs.group_sizes)[:-1])
    shifted = [scores - scores[0] for scores in inputs.grouped_scores()]  # equal scores become exactly 0
    baselines = [own @ counted / max(counted.sum(), 1.0) for own, counted in zip(shifted, lengths, strict=True)]
    return inputs.expand(np.concatenate(shifted) - np.repeat(baselines, inputs.group_sizes))


def compute_gpg_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Compute group policy gradient advantages (GPG, arXiv 2504.02546): A_i = alpha (r_i - mean(r)).

    alpha = responses of the step / responses with nonzero reward
    """
    scores = np.asarray(inputs.scores, np.float64)
    return inputs.expand(len(scores) / max(np.count_nonzero(scores), 1) * centre_scores(inputs))


def compute_gdpo_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Compute GRPO's advantages of each reward component, then whiten their weighted sum (GDPO, arXiv 2601.05242).

    Components and weights are `algorithm.options.gdpo.rewards` and `weights`, or without `rewards` the sources of
    `reward.components` with their weights in this step; the reward itself has no effect.
    """
    rewards, weights = inputs.options.rewards, inputs.options.weights
    given = dict(zip(rewards, weights or [1.0] * len(rewards), strict=True)) if rewards else inputs.weights
    total = torch.zeros_like(inputs.token_rewards)
    for name, weight in given.items():
        scores = inputs.components.get(name, np.full(len(inputs.scores), np.nan))
        if np.isnan(scores).any():
            raise UserError(
                f'{np.isnan(scores).sum()} of {len(scores)} rollouts have no reward component "{name}"',
                source="algorithm.options.gdpo.rewards",
                expected=f"components that every reward has, of {', '.join(inputs.components) or 'none'}",
                hint="the reward function returns them in a dict, beside score; reward.components reports its sources",
            )
        total += weight * compute_grpo_advantages(replace(inputs, scores=scores), config)
    return whiten_over_ranks(total, inputs.loss_mask, inputs.group)


def compute_optimal_token_baseline_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Compute advantages with a baseline per response position of a group (optimal token baseline, as in verl).

        A_t = G_t - sum_j W_jt G_jt / sum_j W_jt        over the responses j of the group that reach t
        G_t = sum_{l >= 0} r_{t+l}
        W_t = sum_{u <= t} (1 - 2 p_u + sum_v p_v^2)    squared gradients of log p on the logits, up to t

    p is the policy before the update; squared importance weights, if any, multiply the terms of W. At W = 0 the
    baseline is the plain mean. The part of a group's longest response that no other reaches has A_t = 0, or with
    `tir_optimal_token_baseline` A_t = G_t. Collective: a group may be spread over ranks.
    """
    where = inputs.loss_mask.nonzero(as_tuple=True)[0]
    ids, device = inputs.sequence_ids[where], where.device
    assert inputs.old_logprobs is not None and inputs.sum_pi_squared is not None, "`estimate` computes both for it"
    old_logprobs, squares = inputs.old_logprobs[where].double(), inputs.sum_pi_squared[where].double()
    energy = 1.0 - 2.0 * old_logprobs.exp() + squares
    if inputs.importance_weights is not None:
        energy = energy * inputs.importance_weights[where].double().square()
    weights = _discounted_sums(energy.flip(0), ids.flip(0), 1.0).flip(0) + _WEIGHT_EPSILON
    sizes = torch.as_tensor(inputs.group_sizes, device=device)
    groups = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes)[inputs.find_rollouts()[where]]
    # A common shift per group makes advantages of equal rewards exactly 0.
    shifts = torch.tensor([scores[0] for scores in inputs.grouped_scores()], dtype=torch.float32, device=device)
    returns = _discounted_sums(inputs.token_rewards[where].double(), ids, 1.0) - shifts[groups]
    count = torch.arange(len(ids), device=device)
    starts = torch.where(mark_first(ids), count, 0)
    places = count - (starts.cummax(0).values if len(ids) else starts)  # in the tokens of its sequence
    baselines, is_alone = _average_by_place(returns, weights, groups, places, inputs)
    if config.adv_estimator == "tir_optimal_token_baseline":
        baselines = torch.where(is_alone, -shifts[groups], baselines)
    return _place(torch.where(sizes[groups] > 1, returns - baselines, 0.0), where, inputs)


def compute_remax_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Compute A_i = r_i - r(greedy response to the same prompt) (ReMax, arXiv 2310.10505); needs no group."""
    assert inputs.baselines is not None, "greedy responses are collected for it"
    return inputs.expand(inputs.scores - np.repeat(inputs.baselines, inputs.group_sizes))


def compute_reinforce_plus_plus_baseline_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Compute REINFORCE++ advantages with a group-mean baseline (arXiv 2501.03262): r_i - mean(r), then whitened.

    If reward correlates with length, whitening gives even a group of one a small advantage.
    """
    return whiten_over_ranks(inputs.expand(centre_scores(inputs)), inputs.loss_mask, inputs.group)


def compute_reinforce_plus_plus_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Compute whitened discounted returns of the token rewards (REINFORCE++, arXiv 2501.03262).

    A_t = sum_{l >= 0} gamma^l r_{t+l}
    """
    where = inputs.loss_mask.nonzero(as_tuple=True)[0]
    sums = _discounted_sums(inputs.token_rewards[where].double(), inputs.sequence_ids[where], config.gamma)
    return whiten_over_ranks(_place(sums, where, inputs), inputs.loss_mask, inputs.group)


def compute_gae_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Compute generalized advantage estimates (arXiv 1506.02438, eq. 11-16), whitened as in PPO implementations.

        delta_t = r_t + gamma V_{t+1} - V_t             V = 0 after the last token
        A_t = sum_{l >= 0} (gamma lambda)^l delta_{t+l}
        returns_t = A_t + V_t                           before A is whitened

    Time counts tokens in the loss. Responses truncated at the length limit are not bootstrapped.
    """
    where = inputs.loss_mask.nonzero(as_tuple=True)[0]
    ids = inputs.sequence_ids[where]
    assert inputs.values is not None, "it needs a critic"
    rewards, values = inputs.token_rewards[where].double(), inputs.values[where].double()
    has_next = ids == ids.roll(-1)
    has_next[-1:] = False
    deltas = rewards + config.gamma * torch.where(has_next, values.roll(-1), 0.0) - values
    advantages = _discounted_sums(deltas, ids, config.gamma * config.gae_lambda)
    whitened = whiten_over_ranks(_place(advantages, where, inputs), inputs.loss_mask, inputs.group)
    return Advantages(whitened, _place(advantages + values, where, inputs).float())


def compute_distill_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Return zeros: distillation ignores rewards, and `samples/experience.py` adds log-prob gaps to the teachers."""
    return torch.zeros_like(inputs.token_rewards)


def whiten_over_ranks(values: torch.Tensor, loss_mask: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Standardize values [t] over the masked-in tokens of all ranks; collective.

        (x - mean) / sqrt(variance + 1e-8)          variance unbiased

    Returns:
        [t] float32, 0 outside the mask, for equal values, and for a single token.
    """
    values = torch.where(loss_mask, values.double(), 0.0)
    sums = torch.stack([loss_mask.sum().double(), values.sum()])
    dist.all_reduce(sums, group=group)
    count, total = sums
    centered = torch.where(loss_mask, values - total / count.clamp(min=1), 0.0)
    squares = centered.square().sum()
    dist.all_reduce(squares, group=group)
    variance = squares / (count - 1).clamp(min=1)
    return (centered * (variance + _VARIANCE_EPSILON).rsqrt()).float()


def _discounted_sums(x: torch.Tensor, ids: torch.Tensor, discount: float) -> torch.Tensor:
    """Compute sum_l discount^l x_{t+l} to the end of each run of equal ids, in log2(t) steps."""
    sums, reach = x.clone(), 1
    while reach < len(x):
        is_same = ids[reach:] == ids[:-reach]
        sums[:-reach] += torch.where(is_same, discount**reach * sums[reach:], 0.0)
        reach *= 2
    return sums


def _average_by_place(
    values: torch.Tensor, weights: torch.Tensor, groups: torch.Tensor, places: torch.Tensor, inputs: AdvantageInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's weighted mean over its group and position, and whether it is alone there; collective."""
    longest = (places.max() if len(places) else places.new_zeros(())) + 1
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=inputs.group)
    width = int(longest)
    cells = groups * width + places
    sums = values.new_zeros(3, len(inputs.group_sizes) * width)
    sums.index_add_(1, cells, torch.stack([values * weights, weights, torch.ones_like(weights)]))
    dist.all_reduce(sums, group=inputs.group)
    return (sums[0] / sums[1].clamp(min=torch.finfo(sums.dtype).tiny))[cells], sums[2][cells] == 1


def _place(values: torch.Tensor, where: torch.Tensor, inputs: AdvantageInputs) -> torch.Tensor:
    """Scatter the values of the tokens in the loss into a [t] tensor of zeros."""
    return torch.zeros(len(inputs.loss_mask), dtype=values.dtype, device=values.device).index_copy(0, where, values)
