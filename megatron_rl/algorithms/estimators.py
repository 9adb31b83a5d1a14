# SPDX-License-Identifier: Apache-2.0
"""The advantage estimators that come with the package.

Estimators over rewards give one number per rollout, and every token of the response gets it. Two edge cases
are common to them: a group of equal rewards has advantages of exactly 0, and so has a group of one (there
is nothing to compare with). Arithmetic is float64; results are float32.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.advantages import AdvantageInputs, Advantages
from megatron_rl.config.schema import AlgorithmConfig

_STD_EPSILON = 1e-6
_VARIANCE_EPSILON = 1e-8


def compute_grpo_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Group-relative advantages (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)

    with the unbiased standard deviation of the group. `norm_adv_by_std=False` leaves out the division.
    """
    if not config.norm_adv_by_std:
        return compute_dr_grpo_advantages(inputs, config)
    return inputs.expand(np.concatenate([
        _centre(r) / (r.std(ddof=1) + _STD_EPSILON) if len(r) > 1 else np.zeros(1) for r in inputs.grouped_scores()]))


def compute_dr_grpo_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """A_i = r_i - mean(r) of the group (Dr. GRPO, arXiv 2503.20783); the paper aggregates by `constant`."""
    return inputs.expand(_centred_scores(inputs))


def compute_rloo_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """REINFORCE leave-one-out (arXiv 2402.14740).

        A_i = r_i - mean_{j != i} r_j = n / (n - 1) (r_i - mean(r))
    """
    return inputs.expand(np.concatenate([
        _centre(r) * len(r) / max(len(r) - 1, 1) for r in inputs.grouped_scores()]))


def compute_remax_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """A_i = r_i - r(greedy response to the same prompt) (ReMax, arXiv 2310.10505); needs no group."""
    return inputs.expand(inputs.scores - np.repeat(inputs.baselines, inputs.group_sizes))


def compute_reinforce_plus_plus_baseline_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """REINFORCE++ with the mean of the group as baseline (arXiv 2501.03262): r_i - mean(r), then whitened.

    Whitening subtracts the mean over tokens, which is not 0 when better responses are longer or shorter: a
    group of one then has a small advantage, unless all advantages are 0.
    """
    return whiten_over_ranks(inputs.expand(_centred_scores(inputs)), inputs.loss_mask, inputs.group)


def compute_reinforce_plus_plus_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """REINFORCE++ (arXiv 2501.03262): discounted returns of the token rewards, whitened over all tokens.

        A_t = sum_{l >= 0} gamma^l r_{t+l}
    """
    where = inputs.loss_mask.nonzero(as_tuple=True)[0]
    sums = _discounted_sums(inputs.token_rewards[where].double(), inputs.sequence_ids[where], config.gamma)
    return whiten_over_ranks(_place(sums, where, inputs), inputs.loss_mask, inputs.group)


def compute_gae_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 11-16), whitened as PPO implementations do.

        delta_t = r_t + gamma V_{t+1} - V_t             V = 0 after the last token
        A_t = sum_{l >= 0} (gamma lambda)^l delta_{t+l}
        returns_t = A_t + V_t                           before A is whitened

    Time counts tokens in the loss. A response cut at the length limit ends like any other: nothing is
    bootstrapped.
    """
    where = inputs.loss_mask.nonzero(as_tuple=True)[0]
    ids = inputs.sequence_ids[where]
    rewards, values = inputs.token_rewards[where].double(), inputs.values[where].double()
    has_next = ids == ids.roll(-1)
    has_next[-1:] = False
    deltas = rewards + config.gamma * torch.where(has_next, values.roll(-1), 0.0) - values
    advantages = _discounted_sums(deltas, ids, config.gamma * config.gae_lambda)
    whitened = whiten_over_ranks(_place(advantages, where, inputs), inputs.loss_mask, inputs.group)
    return Advantages(whitened, _place(advantages + values, where, inputs).float())


def whiten_over_ranks(values: torch.Tensor, loss_mask: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Subtract the mean and divide by the standard deviation over the masked-in tokens of all ranks; collective.

        (x - mean) / sqrt(variance + 1e-8)          variance unbiased

    Equal values, and a single token, become 0. The statistics are sums over the group, hence the same for
    every distribution of the tokens over ranks.

    Args:
        values: [t]; anything outside the mask.
        loss_mask: [t] bool.
        group: ranks that hold different tokens.

    Returns:
        [t] float32, 0 outside the mask.
    """
    values = torch.where(loss_mask, values.double(), 0.0)
    sums = torch.stack([loss_mask.sum().double(), values.sum()])
    dist.all_reduce(sums, group=group)
    count, total = sums
    centred = torch.where(loss_mask, values - total / count.clamp(min=1), 0.0)
    squares = centred.square().sum()
    dist.all_reduce(squares, group=group)
    variance = squares / (count - 1).clamp(min=1)
    return (centred * (variance + _VARIANCE_EPSILON).rsqrt()).float()


def _centre(scores: np.ndarray) -> np.ndarray:
    """Scores minus their mean; the shift by the first one makes equal scores exactly 0, whatever they are."""
    shifted = scores - scores[0]
    return shifted - shifted.mean()


def _centred_scores(inputs: AdvantageInputs) -> np.ndarray:
    return np.concatenate([_centre(scores) for scores in inputs.grouped_scores()])


def _discounted_sums(x: torch.Tensor, ids: torch.Tensor, discount: float) -> torch.Tensor:
    """sum_l discount^l x_{t+l} to the end of each run of equal ids, in log2(t) steps.

    After the step with `reach` k every entry holds the sum of the next 2k terms, of its own sequence.
    """
    sums, reach = x.clone(), 1
    while reach < len(x):
        is_same = ids[reach:] == ids[:-reach]
        sums[:-reach] += torch.where(is_same, discount**reach * sums[reach:], 0.0)
        reach *= 2
    return sums


def _place(values: torch.Tensor, where: torch.Tensor, inputs: AdvantageInputs) -> torch.Tensor:
    """Put the values of the tokens in the loss into a [t] tensor of zeros."""
    return torch.zeros(len(inputs.loss_mask), dtype=values.dtype, device=values.device).index_copy(0, where, values)
