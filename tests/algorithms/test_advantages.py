# SPDX-License-Identifier: Apache-2.0
"""Group-relative advantages on numbers done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_rl.algorithms.advantages import ADVANTAGE_ESTIMATORS, compute_grpo_advantages
from megatron_rl.config.schema import AlgorithmConfig

NORMALISED, CENTRED = AlgorithmConfig(), AlgorithmConfig(norm_adv_by_std=False)


def test_normalised_by_hand() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, unbiased variance 4 * (1/4) / 3 = 1/3."""
    unit = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    found = compute_grpo_advantages([[1.0, 0.0, 0.0, 1.0]], NORMALISED)
    np.testing.assert_allclose(found, [unit, -unit, -unit, unit], rtol=1e-12)
    assert found.dtype == np.float64


def test_without_normalisation_by_hand() -> None:
    found = compute_grpo_advantages([[3.0, 1.0, 2.0], [0.0, 5.0]], CENTRED)
    assert found.tolist() == [1.0, -1.0, 0.0, -2.5, 2.5]


def test_groups_of_unequal_size_are_independent_and_in_order() -> None:
    """Rewards 0, 2: std sqrt(2), so -+ 1 / sqrt(2); 1, 2, 3: std 1, so -1, 0, 1."""
    found = compute_grpo_advantages([[0.0, 2.0], [1.0, 2.0, 3.0], [7.0]], NORMALISED)
    half = 1 / (math.sqrt(2) + 1e-6)
    np.testing.assert_allclose(found, [-half, half, -1 / (1 + 1e-6), 0, 1 / (1 + 1e-6), 0], rtol=1e-12)


@pytest.mark.parametrize("config", [NORMALISED, CENTRED])
@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0, 0.0], [-2.5] * 8, [4.0]])
def test_equal_rewards_get_exactly_zero(rewards: list[float], config: AlgorithmConfig) -> None:
    assert compute_grpo_advantages([rewards], config).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3])
@pytest.mark.parametrize("group_size", [3, 6, 7])
def test_equal_rewards_that_are_no_binary_fractions_get_almost_zero(value: float, group_size: int) -> None:
    """The mean of equal numbers may be off by one rounding (6e-17); the epsilon keeps the quotient small.

    Without it the quotient of two roundings would be of the order of 1.
    """
    assert np.abs(compute_grpo_advantages([[value] * group_size], NORMALISED)).max() < 1e-9


def test_normalised_groups_have_mean_zero_and_unit_deviation() -> None:
    rewards = np.random.default_rng(0).normal(size=(5, 8)) * 3 + 1
    found = compute_grpo_advantages(rewards.tolist(), NORMALISED).reshape(5, 8)
    np.testing.assert_allclose(found.mean(1), 0, atol=1e-12)
    np.testing.assert_allclose(found.std(1, ddof=1), 1, rtol=1e-5)


def test_estimator_is_found_by_the_default_name() -> None:
    assert ADVANTAGE_ESTIMATORS[AlgorithmConfig().adv_estimator] is compute_grpo_advantages
