# SPDX-License-Identifier: Apache-2.0
"""Every advantage estimator against its definition as a loop, on one rank and on several.

Rollouts have ragged lengths, groups ragged sizes (one of them a group of one); one response is masked as
truncated, and one rank of three has nothing but padding in the loss. Inputs are float32 numbers, references
float64: results agree to float32 rounding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.algorithms.advantages import (
    AdvantageInputs,
    compute_advantages,
    compute_token_rewards,
)
from megatron_rl.algorithms.estimators import whiten_over_ranks
from megatron_rl.config.algorithm import AlgorithmConfig, GdpoOptions
from megatron_rl.types import UserError

GROUP_SIZES = [3, 1, 2, 4]
RESPONSE_LENGTHS = [4, 1, 7, 3, 2, 5, 6, 1, 9, 2]
SCORES = [1.0, 0.0, 0.25, 0.5, 0.1, 0.1, 2.0, -1.0, 0.5, 0.0]
COMPONENTS = {"clear": [*reversed(SCORES)], "short": [float(n > 3) for n in RESPONSE_LENGTHS]}
BASELINES = [0.5, 0.0, 1.0, -0.5]
MASKED = 5  # index of the response that is masked as a whole
PROMPT_LENGTH = 2
# Which rollouts each rank holds, by world size.
SHARES = {
    1: [[3, 0, 9, 5, 1, 2, 8, 4, 7, 6]],
    2: [[0, 1, 2], [9, 8, 7, 6, 5, 4, 3]],
    3: [[8, 0, 1, 2, 3], [5], [4, 6, 7, 9]],
}
CONFIGS = {
    "grpo": AlgorithmConfig(adv_estimator="grpo"),
    "grpo without std": AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std=False),
    "dr_grpo": AlgorithmConfig(adv_estimator="dr_grpo"),
    "grpo_passk": AlgorithmConfig(adv_estimator="grpo_passk"),
    "grpo_passk without std": AlgorithmConfig(adv_estimator="grpo_passk", norm_adv_by_std=False),
    "opo": AlgorithmConfig(adv_estimator="opo"),
    "gpg": AlgorithmConfig(adv_estimator="gpg"),
    "optimal_token_baseline": AlgorithmConfig(adv_estimator="optimal_token_baseline"),
    "tir_optimal_token_baseline": AlgorithmConfig(adv_estimator="tir_optimal_token_baseline"),
    "gdpo": AlgorithmConfig(adv_estimator="gdpo", options={"gdpo": GdpoOptions(["clear", "short"], [1.0, -0.25])}),
    "gdpo, equal weights": AlgorithmConfig(adv_estimator="gdpo", options={"gdpo": GdpoOptions(["short", "clear"])}),
    "rloo": AlgorithmConfig(adv_estimator="rloo"),
    "remax": AlgorithmConfig(adv_estimator="remax"),
    "reinforce_plus_plus": AlgorithmConfig(adv_estimator="reinforce_plus_plus", gamma=0.9),
    "reinforce_plus_plus, no discount": AlgorithmConfig(adv_estimator="reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": AlgorithmConfig(adv_estimator="reinforce_plus_plus_baseline"),
    "gae": AlgorithmConfig(adv_estimator="gae", gamma=0.95, gae_lambda=0.8),
    "gae, no discount": AlgorithmConfig(adv_estimator="gae"),
    "gae, one step": AlgorithmConfig(adv_estimator="gae", gae_lambda=0.0),
}


def draw_tokens(rollout: int) -> tuple[list[float], list[float]]:
    """KL and value of each response token of a rollout, float32 numbers."""
    rng = np.random.default_rng(rollout)
    kl, values = rng.normal(size=(2, RESPONSE_LENGTHS[rollout])).astype(np.float32)
    return kl.tolist(), values.tolist()


def draw_policy(rollout: int) -> tuple[list[float], list[float], list[float]]:
    """Old log-prob, sum of squared probabilities and importance weight of each response token of a rollout."""
    rng = np.random.default_rng(100 + rollout)
    p, others, weights = rng.uniform(0.1, 0.9, size=(3, RESPONSE_LENGTHS[rollout])).astype(np.float32)
    return np.log(p).tolist(), (p**2 + others * (1 - p) ** 2).tolist(), (0.5 + weights).tolist()


def build_inputs(rollouts: list[int], group: dist.ProcessGroup, scores: list[float] | None = None) -> AdvantageInputs:
    """The packed tensors of a rank: prompt and response of each rollout, padding in the middle and at the end."""
    ids, mask, kls, values, policy = [], [], [], [], [[], [], []]
    for place, rollout in enumerate(rollouts):
        kl, value = draw_tokens(rollout)
        nothing, padding = [float("nan")] * PROMPT_LENGTH, [0.0] * (3 if place % 3 == 2 else 0)
        ids += [rollout] * (PROMPT_LENGTH + len(kl)) + [-1] * len(padding)
        mask += [False] * PROMPT_LENGTH + [rollout != MASKED] * len(kl) + [False] * len(padding)
        kls += nothing + kl + padding
        values += nothing + value + padding
        for column, numbers in zip(policy, draw_policy(rollout), strict=True):
            column += nothing + numbers + padding
    scores = SCORES if scores is None else scores
    loss_mask, sequence_ids = torch.tensor([*mask, False]), torch.tensor([*ids, -1])
    return AdvantageInputs(
        scores=np.array(scores),
        group_sizes=np.array(GROUP_SIZES),
        baselines=np.array(BASELINES),
        token_rewards=compute_token_rewards(scores, torch.tensor([*kls, 0.0]), 0.5, loss_mask, sequence_ids),
        values=torch.tensor([*values, 0.0]),
        loss_mask=loss_mask,
        sequence_ids=sequence_ids,
        group=group,
        components={name: np.array(values) for name, values in COMPONENTS.items()},
        **{
            name: torch.tensor([*column, 0.0])
            for name, column in zip(("old_logprobs", "sum_pi_squared", "importance_weights"), policy, strict=True)
        },
    )


def split_by_rollout(values: torch.Tensor, inputs: AdvantageInputs) -> dict[int, list[float]]:
    """Split values [t] into the values of each rollout's tokens in the loss."""
    ids = sorted(set(inputs.sequence_ids.tolist()) - {-1})
    return {i: values[(inputs.sequence_ids == i) & inputs.loss_mask].tolist() for i in ids}


def _estimate_on_rank(rank: int, world_size: int) -> dict[str, Any]:
    inputs, found = build_inputs(SHARES[world_size][rank], dist.group.WORLD), {}
    for name, config in CONFIGS.items():
        result = compute_advantages(inputs, config)
        assert result.advantages.dtype == torch.float32 and not result.advantages[~inputs.loss_mask].any()
        returns = None if result.returns is None else split_by_rollout(result.returns, inputs)
        found[name] = split_by_rollout(result.advantages, inputs), returns
    return found


@cache
def estimate(world_size: int) -> dict[str, tuple[dict[int, list[float]], dict[int, list[float]] | None]]:
    """Advantages and returns of every configuration, put together from all ranks."""
    ranks = run_ranks(_estimate_on_rank, world_size)
    found = {}
    for name in CONFIGS:
        returns = [r[name][1] for r in ranks]
        found[name] = (
            {i: x for r in ranks for i, x in r[name][0].items()},
            None if returns[0] is None else {i: x for r in returns for i, x in r.items()},
        )
    return found


def score_by_loop(config: AlgorithmConfig, rollout: int, scores: list[float] = SCORES) -> float:
    """The advantage of a rollout by the estimators over rewards, from the definitions."""
    if config.adv_estimator == "gdpo":
        options, grpo = config.options["gdpo"], CONFIGS["grpo"]
        weights = options.weights or [1.0, 1.0]
        parts = [score_by_loop(grpo, rollout, COMPONENTS[name]) for name in options.rewards]
        return sum(weight * part for weight, part in zip(weights, parts, strict=True))
    index = next(g for g in range(len(GROUP_SIZES)) if rollout < sum(GROUP_SIZES[: g + 1]))
    first, size = sum(GROUP_SIZES[:index]), GROUP_SIZES[index]
    group, mine = scores[first : first + size], scores[rollout]
    if config.adv_estimator == "remax":
        return mine - BASELINES[index]
    if size == 1:
        return 0.0
    mean = sum(group) / size
    if config.adv_estimator == "grpo_passk":
        best, second = sorted(group, reverse=True)[:2]
        deviation = math.sqrt(sum((r - mean) ** 2 for r in group) / (size - 1)) + 1e-6
        return (best - second) / (deviation if config.norm_adv_by_std else 1.0) if mine == best else 0.0
    if config.adv_estimator == "opo":
        lengths = [0 if i == MASKED else RESPONSE_LENGTHS[i] for i in range(first, first + size)]
        return mine - sum(n * r for n, r in zip(lengths, group, strict=True)) / sum(lengths)
    if config.adv_estimator == "gpg":
        return len(SCORES) / sum(r != 0 for r in SCORES) * (mine - mean)
    if config.adv_estimator == "rloo":
        return mine - (sum(group) - mine) / (size - 1)
    if config.adv_estimator == "grpo" and config.norm_adv_by_std:
        return (mine - mean) / (math.sqrt(sum((r - mean) ** 2 for r in group) / (size - 1)) + 1e-6)
    return mine - mean


def token_baselines_by_loop(rollout: int, is_tir: bool) -> list[float]:
    """Advantages by the optimal token baseline: at each place the returns of the group, weighted by their energies.

    With `is_tir` a place that one response alone reaches has no baseline.
    """
    index = next(g for g in range(len(GROUP_SIZES)) if rollout < sum(GROUP_SIZES[: g + 1]))
    first, size = sum(GROUP_SIZES[:index]), GROUP_SIZES[index]
    advantages = []
    for t in range(RESPONSE_LENGTHS[rollout]):
        pairs = {}
        for j in range(first, first + size):
            if j != MASKED and RESPONSE_LENGTHS[j] > t:
                energies = [
                    (1 - 2 * math.exp(p) + square) * weight**2
                    for p, square, weight in zip(*draw_policy(j), strict=True)
                ]
                pairs[j] = sum(energies[: t + 1]), sum(rewards_by_loop(j)[t:])
        baseline = sum(w * g for w, g in pairs.values()) / sum(w for w, _ in pairs.values())
        baseline *= not is_tir or len(pairs) > 1
        advantages.append(pairs[rollout][1] - baseline if size > 1 else 0.0)
    return advantages


def rewards_by_loop(rollout: int) -> list[float]:
    """The reward of each token: the KL's share, and the score on the last one."""
    kl, _ = draw_tokens(rollout)
    last = len(kl) - 1
    return [float(np.float32(-0.5 * k + (SCORES[rollout] if t == last else 0.0))) for t, k in enumerate(kl)]


def tokens_by_loop(config: AlgorithmConfig, rollout: int) -> tuple[list[float], list[float] | None]:
    """Advantages of the tokens of a rollout before whitening, and returns."""
    values, rewards = draw_tokens(rollout)[1], rewards_by_loop(rollout)
    last = len(rewards) - 1
    if config.adv_estimator.endswith("optimal_token_baseline"):
        return token_baselines_by_loop(rollout, config.adv_estimator.startswith("tir")), None
    if config.adv_estimator == "reinforce_plus_plus":
        return [sum(config.gamma ** (u - t) * rewards[u] for u in range(t, last + 1)) for t in range(last + 1)], None
    if config.adv_estimator == "gae":
        advantages, following = [0.0] * (last + 1), 0.0
        for t in reversed(range(last + 1)):
            next_value = values[t + 1] if t < last else 0.0
            delta = rewards[t] + config.gamma * next_value - values[t]
            following = advantages[t] = delta + config.gamma * config.gae_lambda * following
        return advantages, [a + v for a, v in zip(advantages, values, strict=True)]
    return [score_by_loop(config, rollout)] * (last + 1), None


def whiten_by_loop(tokens: dict[int, list[float]]) -> dict[int, list[float]]:
    """Mean 0 and unbiased variance 1 over all tokens."""
    flat = [x for sequence in tokens.values() for x in sequence]
    mean = sum(flat) / len(flat)
    variance = sum((x - mean) ** 2 for x in flat) / (len(flat) - 1)
    return {i: [(x - mean) / math.sqrt(variance + 1e-8) for x in sequence] for i, sequence in tokens.items()}


def is_whitened(config: AlgorithmConfig) -> bool:
    return config.adv_estimator in ("gae", "gdpo") or config.adv_estimator.startswith("reinforce")


def expect(config: AlgorithmConfig, rollouts: list[int]) -> dict[int, list[float]]:
    """Advantages by loop, whitened over these rollouts if the estimator whitens."""
    tokens = {i: [] if i == MASKED else tokens_by_loop(config, i)[0] for i in rollouts}
    return whiten_by_loop(tokens) if is_whitened(config) else tokens


def assert_close(found: dict[int, list[float]], expected: dict[int, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for i in found:
        np.testing.assert_allclose(found[i], expected[i], rtol=1e-6, atol=1e-6, err_msg=f"rollout {i}")


@pytest.mark.parametrize("world_size", SHARES)
@pytest.mark.parametrize("name", CONFIGS)
def test_advantages_equal_the_loop(name: str, world_size: int) -> None:
    """On one rank, and on several that hold unequal shares of the rollouts."""
    assert_close(estimate(world_size)[name][0], expect(CONFIGS[name], list(range(len(SCORES)))))


@pytest.mark.parametrize("world_size", SHARES)
@pytest.mark.parametrize("name", CONFIGS)
def test_returns_equal_the_loop(name: str, world_size: int) -> None:
    """Advantages before whitening plus values, for gae only."""
    returns = estimate(world_size)[name][1]
    if CONFIGS[name].adv_estimator != "gae":
        assert returns is None
        return
    assert_close(returns, {i: [] if i == MASKED else tokens_by_loop(CONFIGS[name], i)[1] for i in range(len(SCORES))})


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if is_whitened(config)])
def test_whitening_by_rank_would_be_noticed(name: str) -> None:
    """The tests above can fail: statistics of either half alone give numbers far from the global ones."""
    everything = expect(CONFIGS[name], list(range(len(SCORES))))
    for share in SHARES[2]:
        alone = expect(CONFIGS[name], share)
        gap = max(abs(a - b) for i in share for a, b in zip(alone[i], everything[i], strict=True))
        assert gap > 0.1


def test_nothing_changes_where_every_rollout_has_a_reward() -> None:
    """Bit for bit, also in groups of one."""

    def on_rank(rank: int, world_size: int) -> None:
        inputs = build_inputs(SHARES[1][0], dist.group.WORLD)
        for config in CONFIGS.values():
            plain = compute_advantages(inputs, config)
            masked = compute_advantages(replace(inputs, has_reward=np.ones(len(SCORES), bool)), config)
            assert torch.equal(masked.advantages, plain.advantages) and plain.advantages.any()
            assert plain.returns is None or torch.equal(masked.returns, plain.returns)

    run_ranks(on_rank, 1)


def test_gae_by_hand() -> None:
    """Discounts of 1/2: deltas -3/8, 1/8, 1/4; advantages -21/64, 3/16, 1/4; returns add the values."""

    def on_rank(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = AdvantageInputs(
            np.array([1.0]),
            np.array([1]),
            None,
            torch.tensor([0.0, 0.0, 0.0, 1.0]),
            torch.tensor([9.0, 0.5, 0.25, 0.75]),
            torch.tensor([False, True, True, True]),
            torch.zeros(4, dtype=torch.int64),
            dist.group.WORLD,
        )
        found = compute_advantages(inputs, AlgorithmConfig(adv_estimator="gae", gamma=0.5, gae_lambda=0.5))
        return found.advantages, found.returns

    [(advantages, returns)] = run_ranks(on_rank, 1)
    assert returns.tolist() == [0.0, 11 / 64, 7 / 16, 1.0]
    expected = torch.tensor([-21 / 64, 3 / 16, 1 / 4])
    torch.testing.assert_close(advantages[1:], (expected - expected.mean()) / expected.std())


def test_discounted_sums_of_a_long_response_between_short_ones() -> None:
    """Undiscounted returns of 3000 tokens: the scan in log steps reaches the end, and no other response."""
    lengths, generator = [1, 3000, 2], torch.Generator().manual_seed(0)

    def on_rank(rank: int, world_size: int) -> torch.Tensor:
        rewards = torch.randn(sum(lengths), generator=generator)
        ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
        inputs = AdvantageInputs(
            np.zeros(3),
            np.array([3]),
            None,
            rewards,
            torch.zeros(len(ids)),
            torch.ones(len(ids), dtype=torch.bool),
            ids,
            dist.group.WORLD,
        )
        found = compute_advantages(inputs, AlgorithmConfig(adv_estimator="gae")).returns
        expected = torch.cat([part.double().flip(0).cumsum(0).flip(0) for part in rewards.split(lengths)])
        return (found - expected).abs().max()

    [gap] = run_ranks(on_rank, 1)
    assert gap < 1e-5  # returns are of the order of 100, in float32


def test_rewards_of_one_group_by_hand() -> None:
    """Rewards 3, 1, 0, 0 of responses of 1, 2, 3 and 2 tokens.

    Best and second differ by 2 (deviation sqrt(2)); the mean by length is 5/8; half of the rewards are not 0.
    """

    def on_rank(rank: int, world_size: int) -> dict[str, list[float]]:
        ids = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3])
        inputs = AdvantageInputs(
            np.array([3.0, 1.0, 0.0, 0.0]),
            np.array([4]),
            None,
            torch.zeros(8),
            None,
            torch.ones(8).bool(),
            ids,
            dist.group.WORLD,
        )
        first_tokens = [0, 1, 3, 6]
        return {
            name: compute_advantages(inputs, CONFIGS[name]).advantages[first_tokens].tolist()
            for name in ("grpo_passk", "grpo_passk without std", "opo", "gpg")
        }

    [found] = run_ranks(on_rank, 1)
    assert found["grpo_passk"] == pytest.approx([2 / math.sqrt(2), 0, 0, 0], rel=1e-6)
    assert found["grpo_passk without std"] == [2.0, 0.0, 0.0, 0.0]
    assert found["opo"] == [2.375, 0.375, -0.625, -0.625]
    assert found["gpg"] == [4.0, 0.0, -2.0, -2.0]


def test_optimal_token_baseline_by_hand() -> None:
    """Two responses of two and one tokens, rewards 1 and 0; the last place has one return, hence advantage 0.

    The estimator of verl's name gives it the return, also in a group of equal rewards.

    Energies 1 - 2 p + sum p^2: 3/4 (p 1/2, squares 3/4) and 1/4 (p 3/4, squares 3/4): baseline 3/4 of the first place.
    If a certain token leaves no energy at all, the baseline is the plain mean, and a group of equal rewards gets 0.
    """

    def on_rank(rank: int, world_size: int, name: str) -> list[list[float]]:
        found = []
        for rewards, p, squares in (
            ([0.0, 1.0, 0.0], [0.5, 0.5, 0.75], 0.75),
            ([0.0, 1.0, 0.0], [1.0, 1.0, 1.0], 1.0),
            ([0.0, 0.1, 0.1], [0.5, 0.5, 0.75], 0.75),
        ):
            inputs = AdvantageInputs(
                np.array([rewards[1], rewards[2]]),
                np.array([2]),
                None,
                torch.tensor(rewards),
                None,
                torch.ones(3).bool(),
                torch.tensor([0, 0, 1]),
                dist.group.WORLD,
                old_logprobs=torch.tensor(p).log(),
                sum_pi_squared=torch.full((3,), squares),
            )
            found.append(compute_advantages(inputs, CONFIGS[name]).advantages.tolist())
        return found

    [(weighted, certain, equal)] = run_ranks(on_rank, 1, "optimal_token_baseline")
    assert weighted == pytest.approx([0.25, 0.0, -0.75], abs=1e-6)
    assert certain == [0.5, 0.0, -0.5] and equal == [0.0, 0.0, 0.0]
    [(weighted, certain, equal)] = run_ranks(on_rank, 1, "tir_optimal_token_baseline")
    assert weighted == pytest.approx([0.25, 1.0, -0.75], abs=1e-6)
    assert certain == [0.5, 1.0, -0.5] and equal == pytest.approx([0.0, 0.1, 0.0])


def test_gdpo_without_names_takes_the_sources_of_the_reward_with_their_weights_of_the_step() -> None:
    """And without them, or beside names of its own, they have no effect."""

    def on_rank(rank: int, world_size: int) -> None:
        inputs = build_inputs(SHARES[1][0], dist.group.WORLD)
        found = compute_advantages(
            replace(inputs, weights={"clear": 1.0, "short": -0.25}), AlgorithmConfig(adv_estimator="gdpo")
        ).advantages
        named = compute_advantages(inputs, CONFIGS["gdpo"]).advantages
        assert torch.equal(found, named) and found.any()
        others = replace(inputs, weights={"clear": 7.0, "short": 1.0})
        assert torch.equal(compute_advantages(others, CONFIGS["gdpo"]).advantages, named)

    run_ranks(on_rank, 1)


def test_gdpo_of_the_reward_alone_is_whitened_grpo() -> None:
    """The reward itself has no effect. A component that a rollout does not report is refused."""

    def on_rank(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = build_inputs(SHARES[1][0], dist.group.WORLD)
        gdpo = AlgorithmConfig(adv_estimator="gdpo", options={"gdpo": GdpoOptions(["all"], [2.0])})
        grpo = compute_advantages(inputs, CONFIGS["grpo"]).advantages
        given = replace(inputs, components={"all": inputs.scores}, scores=0 * inputs.scores)
        found = compute_advantages(given, gdpo).advantages
        for wrong in ({"other": inputs.scores}, {"all": np.where(inputs.scores < 0, np.nan, 0.0)}):
            with pytest.raises(UserError, match='(10|1) of 10 rollouts have no reward component "all"'):
                compute_advantages(replace(inputs, components=wrong), gdpo)
        return found, whiten_over_ranks(grpo, inputs.loss_mask, dist.group.WORLD)

    [(found, expected)] = run_ranks(on_rank, 1)
    torch.testing.assert_close(found, expected)
    assert expected.any()


@pytest.mark.parametrize("value", [1.0, 0.1, 1 / 3, -2.5])
def test_equal_rewards_get_exactly_zero(value: float) -> None:
    """Also numbers whose mean is rounded, with and without whitening, and without a NaN (0 / 0)."""

    def on_rank(rank: int, world_size: int) -> dict[str, bool]:
        inputs = build_inputs(SHARES[1][0], dist.group.WORLD, [value] * len(SCORES))
        names = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "grpo_passk", "opo", "gpg"]
        return {name: compute_advantages(inputs, CONFIGS[name]).advantages.eq(0).all().item() for name in names}

    assert all(run_ranks(on_rank, 1)[0].values())


def test_normalised_groups_have_mean_zero_and_unit_deviation() -> None:
    """Groups of eight with one token each."""
    scores = np.random.default_rng(0).normal(size=40) * 3 + 1
    inputs = AdvantageInputs(
        scores, np.full(5, 8), None, torch.zeros(40), None, torch.ones(40, dtype=torch.bool), torch.arange(40), None
    )
    found = compute_advantages(inputs, CONFIGS["grpo"]).advantages.double().view(5, 8)
    torch.testing.assert_close(found.mean(1), torch.zeros(5).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.std(1), torch.ones(5).double(), atol=1e-5, rtol=0)


def test_whitening_of_nothing_one_token_and_equal_tokens() -> None:
    """All zeros: no division by a deviation of zero tokens, of one, or of equal ones (0.1 is no binary fraction)."""

    def on_rank(rank: int, world_size: int) -> list[list[float]]:
        garbage = torch.tensor([0.1, 0.1, 0.1, float("nan")])
        masks = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
        return [whiten_over_ranks(garbage, mask, dist.group.WORLD).tolist() for mask in masks]

    assert run_ranks(on_rank, 1) == [[[0.0] * 4] * 3]
