# SPDX-License-Identifier: Apache-2.0
"""Clip-Cov and KL-Cov: the chosen tokens, on one rank and on several, and their loss.

The surrogate itself is PPO's (test_policy_losses.py). Not covered: how random the choice of Clip-Cov is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.algorithms.catalog import POLICY_LOSSES
from megatron_rl.algorithms.losses import PolicyLossInputs
from megatron_rl.algorithms.policy_losses import choose_tokens
from megatron_rl.config.algorithm import ClipCovOptions, KlCovOptions
from megatron_rl.config.schema import AlgorithmConfig

LENGTHS = [5, 9, 1, 7, 4, 12]
PROMPT_LENGTH, MASKED = 2, 3  # the response of rollout 3 is masked as a whole
SHARES = {1: [[0, 1, 2, 3, 4, 5]], 2: [[5, 0], [4, 3, 2, 1]], 3: [[1, 5, 2, 4, 0], [3], []]}
CONFIGS = {
    "kl_cov": AlgorithmConfig(policy_loss="kl_cov", options={"kl_cov": KlCovOptions(0.25)}),
    "kl_cov, one": AlgorithmConfig(policy_loss="kl_cov", options={"kl_cov": KlCovOptions(1e-6)}),
    "kl_cov, all": AlgorithmConfig(policy_loss="kl_cov", options={"kl_cov": KlCovOptions(1.0)}),
    "clip_cov": AlgorithmConfig(policy_loss="clip_cov", options={"clip_cov": ClipCovOptions(0.1, 0.1, 2.0)}),
    "clip_cov, all": AlgorithmConfig(policy_loss="clip_cov", options={"clip_cov": ClipCovOptions(1.0, 0.1, 2.0)}),
    "clip_cov, none": AlgorithmConfig(policy_loss="clip_cov", options={"clip_cov": ClipCovOptions(0.1, 50.0, 60.0)}),
}


def draw(rollout: int) -> tuple[list[float], list[float]]:
    """Advantage (the same for all tokens of a rollout) and old log-prob of each response token."""
    rng = np.random.default_rng(rollout)
    return [float(np.float32(rng.normal()))] * LENGTHS[rollout], (-rng.exponential(size=LENGTHS[rollout])).astype(
        np.float32
    ).tolist()


def build_inputs(rollouts: list[int], is_equal: bool = False) -> PolicyLossInputs:
    """The packed tokens of a rank; garbage at masked positions, padding at the end."""
    ids, mask, advantages, logprobs = [], [], [], []
    for rollout in rollouts:
        mine = [[0.0] * LENGTHS[rollout]] * 2 if is_equal else draw(rollout)
        ids += [rollout] * (PROMPT_LENGTH + LENGTHS[rollout])
        mask += [False] * PROMPT_LENGTH + [rollout != MASKED] * LENGTHS[rollout]
        for column, numbers in zip((advantages, logprobs), mine, strict=True):
            column += [float("nan")] * PROMPT_LENGTH + list(numbers)
    tensors = [torch.tensor([*column, 0.0, 0.0]) for column in (logprobs, advantages)]
    return PolicyLossInputs(
        tensors[0], tensors[0], tensors[1], torch.tensor([*mask, False, False]), torch.tensor([*ids, -1, -1])
    )


def _choose_on_rank(rank: int, world_size: int) -> dict[str, list[tuple[int, int]]]:
    found = {}
    for name, config in CONFIGS.items():
        for is_equal in (False, True):
            inputs = build_inputs(SHARES[world_size][rank], is_equal)
            chosen = choose_tokens(inputs, config, dist.group.WORLD)
            assert not chosen[~inputs.loss_mask].any()
            ids = inputs.sequence_ids
            found[f"{name}, equal" if is_equal else name] = [
                (i, t) for i in range(len(LENGTHS)) for t in chosen[ids == i][PROMPT_LENGTH:].nonzero()[:, 0].tolist()
            ]
    return found


@cache
def choose(world_size: int) -> dict[str, set[tuple[int, int]]]:
    """(rollout, place) of the chosen tokens of all ranks."""
    ranks = run_ranks(_choose_on_rank, world_size)
    return {name: {pair for rank in ranks for pair in rank[name]} for name in ranks[0]}


def covariances_by_loop() -> dict[tuple[int, int], float]:
    tokens = {
        (i, t): pair for i in range(len(LENGTHS)) if i != MASKED for t, pair in enumerate(zip(*draw(i), strict=True))
    }
    means = [sum(column) / len(tokens) for column in zip(*tokens.values(), strict=True)]
    return {place: (a - means[0]) * (p - means[1]) for place, (a, p) in tokens.items()}


def test_the_greatest_covariances_are_penalized() -> None:
    covariances = covariances_by_loop()
    order = sorted(covariances, key=covariances.__getitem__, reverse=True)
    assert choose(1)["kl_cov"] == set(order[: int(0.25 * len(order))])
    assert choose(1)["kl_cov, one"] == {order[0]} and choose(1)["kl_cov, all"] == set(order)


def test_covariances_inside_of_the_bounds_are_cut() -> None:
    inside = {place for place, covariance in covariances_by_loop().items() if 0.1 < covariance < 2.0}
    wanted = int(0.1 * len(covariances_by_loop()))
    assert len(inside) > wanted > 1, "the data must make a choice necessary"
    assert choose(1)["clip_cov, all"] == inside and choose(1)["clip_cov, none"] == set()
    assert len(choose(1)["clip_cov"]) == wanted and choose(1)["clip_cov"] < inside


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_choice_is_the_same_on_any_number_of_ranks(world_size: int) -> None:
    """Also among equal covariances, whose order is arbitrary, and with a rank that holds nothing."""
    assert choose(world_size) == choose(1)
    assert len(choose(1)["kl_cov, equal"]) == len(choose(1)["kl_cov"])


def test_chosen_tokens_by_hand() -> None:
    """Ratio 2 of three tokens, the last two chosen: A 1, 1 and -1; Clip-Cov skips tokens that the clip already cuts."""
    old = torch.zeros(3, dtype=torch.float64)
    advantages, chosen = torch.tensor([1.0, 1.0, -1.0]).double(), torch.tensor([False, True, True])
    found = {}
    for name in ("clip_cov", "kl_cov"):
        logprobs = (old + np.log(2.0)).requires_grad_()
        inputs = PolicyLossInputs(logprobs, old, advantages, torch.ones(3).bool(), torch.zeros(3).long(), chosen)
        inputs = replace(inputs, options=KlCovOptions(coef=0.5))
        loss, is_clipped = POLICY_LOSSES[name](inputs, AlgorithmConfig(dual_clip=1.1))
        loss.sum().backward()
        found[name] = loss.tolist(), is_clipped.tolist(), logprobs.grad.tolist()
    assert found["clip_cov"] == ([-1.2, -1.2, 0.0], [True, True, True], [0.0, 0.0, 0.0])
    penalty = 0.5 * np.log(2.0)
    loss, is_clipped, gradient = found["kl_cov"]
    assert loss == pytest.approx([-2.0, -2.0 + penalty, 2.0 + penalty]) and not any(is_clipped)
    assert gradient == pytest.approx([-2.0, -1.5, 2.5])
