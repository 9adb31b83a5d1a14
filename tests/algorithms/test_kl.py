# SPDX-License-Identifier: Apache-2.0
"""KL estimators by hand and in expectation over a categorical distribution; the controllers of the coefficient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms.losses import AdaptiveKL, compute_kl, measure_for_target
from megatron_rl.config.schema import AlgorithmConfig

LOGPROB = st.floats(-20.0, 0.0)


@pytest.mark.parametrize(
    ("kl_type", "expected"),
    [
        ("k1", [math.log(2), -math.log(3), 0.0]),
        ("k2", [math.log(2) ** 2 / 2, math.log(3) ** 2 / 2, 0.0]),
        ("k3", [0.5 - 1 + math.log(2), 3 - 1 - math.log(3), 0.0]),
        ("abs", [math.log(2), math.log(3), 0.0]),
    ],
)
def test_formula_by_hand(kl_type: str, expected: list[float]) -> None:
    """Ratios reference / policy of 1/2, 3 and 1."""
    logprobs = torch.tensor([0.5, 0.2, 0.7], dtype=torch.float64).log()
    ref_logprobs = torch.tensor([0.25, 0.6, 0.7], dtype=torch.float64).log()
    torch.testing.assert_close(compute_kl(logprobs, ref_logprobs, kl_type), torch.tensor(expected, dtype=torch.float64))


@given(LOGPROB, LOGPROB)
def test_k3_is_never_negative(logprob: float, ref_logprob: float) -> None:
    """In float32, in which r - 1 - log r cancels for ratios near 1: within two roundings of |log r|."""
    found = float(compute_kl(torch.tensor([logprob]), torch.tensor([ref_logprob]), "k3"))
    assert found >= -2e-7 * abs(logprob - ref_logprob)


@given(st.floats(-1e-3, 1e-3))
def test_k3_is_accurate_near_equal_policies(log_ratio: float) -> None:
    """k3 = x^2 / 2 + x^3 / 6 + ...: expm1 keeps the digits that exp(x) - 1 - x would lose (5e-7 is x^2/2 here)."""
    found = float(compute_kl(torch.tensor([0.0]), torch.tensor([log_ratio], dtype=torch.float32), "k3"))
    x = float(torch.tensor(log_ratio, dtype=torch.float32))
    assert found == pytest.approx(x * x / 2 + x**3 / 6, abs=2e-7 * abs(x))


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
def test_expectation_is_the_exact_kl(kl_type: str) -> None:
    """Summed over all tokens of a categorical with their probabilities: no sampling noise."""
    torch.manual_seed(0)
    logp, logq = torch.randn(2, 50, dtype=torch.float64).log_softmax(-1)
    exact = (logp.exp() * (logp - logq)).sum()
    torch.testing.assert_close((logp.exp() * compute_kl(logp, logq, kl_type)).sum(), exact)


def test_k2_is_close_to_the_exact_kl_for_close_policies() -> None:
    """k2 is biased: equal to second order only."""
    torch.manual_seed(0)
    z, dz = torch.randn(2, 50, dtype=torch.float64)
    logp, logq = z.log_softmax(-1), (z + 0.01 * dz).log_softmax(-1)
    exact = (logp.exp() * (logp - logq)).sum()
    torch.testing.assert_close((logp.exp() * compute_kl(logp, logq, "k2")).sum(), exact, rtol=0.05, atol=0)


@pytest.mark.parametrize("log_ratio", [20.5, 89.0, 100.0, 1e4])
def test_k3_is_finite_where_its_exponential_is_not(log_ratio: float) -> None:
    """From log r = 20 on a straight line: the slope there, so that the log-prob is still pushed up."""
    logprobs = torch.tensor([-log_ratio], requires_grad=True)
    kl = compute_kl(logprobs, torch.zeros(1), "k3")
    kl.backward()
    assert kl.item() == pytest.approx(math.expm1(20) + math.exp(20) * (log_ratio - 20) - log_ratio, rel=1e-6)
    assert float(logprobs.grad) == pytest.approx(1 - math.exp(20), rel=1e-6)


def test_k3_below_its_bound_is_the_formula_to_the_last_bit() -> None:
    log_ratio = torch.linspace(-60, 20, 1001)
    assert torch.equal(compute_kl(torch.zeros(1001), log_ratio, "k3"), torch.expm1(log_ratio) - log_ratio)


@pytest.mark.parametrize(("kl_type", "expected"), [("k1", 1.0), ("k2", math.log(2)), ("k3", 0.5)])
def test_gradient_by_hand(kl_type: str, expected: float) -> None:
    """With x = log p - log q = log 2: d k1 = 1, d k2 = x, d k3 = 1 - q/p = 1/2."""
    logprobs = torch.tensor([0.5], dtype=torch.float64).log().requires_grad_()
    compute_kl(logprobs, torch.tensor([0.25], dtype=torch.float64).log(), kl_type).sum().backward()
    assert float(logprobs.grad) == pytest.approx(expected)


def test_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kl_type 'k4'"):
        compute_kl(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize(
    ("measured", "num_responses", "factor"),
    [
        (2.0, 100, 1.0),
        (2.2, 100, 1.01),
        (1.8, 100, 0.99),
        (50.0, 100, 1.02),
        (0.0, 100, 0.98),
        (-3.0, 100, 0.98),
        (2.2, 1000, 1.1),
        (0.0, 10**6, 0.8),
    ],
)
def test_adaptive_coefficient_by_hand(measured: float, num_responses: int, factor: float) -> None:
    """Target 2, horizon 1000: relative errors are cut at 0.2; so is the share of the horizon, at 1."""
    controller = AdaptiveKL(0.5, target=2.0, horizon=1000.0)
    controller.update(measured, num_responses)
    assert controller.coef == pytest.approx(0.5 * factor, rel=1e-12)


def test_adaptive_coefficient_settles_where_the_kl_is_on_target() -> None:
    """A toy policy whose KL is 1 / coef: from far off on both sides the coefficient comes to 1 / target."""
    for first in (0.01, 10.0):
        controller = AdaptiveKL(first, target=4.0, horizon=1000.0)
        for _ in range(200):
            controller.update(1.0 / controller.coef, 500)
        assert controller.coef == pytest.approx(0.25, rel=1e-3)


def test_controllers_resume() -> None:
    """One resumes its coefficient; after a run without a controller it starts from the config."""
    adaptive = AdaptiveKL(0.5, target=2.0, horizon=1000.0)
    adaptive.update(4.0, 100)
    resumed = AdaptiveKL(0.5, target=2.0, horizon=1000.0)
    resumed.load_state_dict(adaptive.state_dict())
    assert resumed.coef == adaptive.coef != 0.5
    resumed.load_state_dict({})
    assert resumed.coef == adaptive.coef


def test_the_target_counts_responses_or_tokens() -> None:
    """Responses of 100 and 50 tokens with 0.02 and 0.06 nats a token, and one without a token in the loss."""
    kl, tokens = np.array([2.0, 3.0, 0.0]), np.array([100.0, 50.0, 0.0])
    per_response, per_token = (
        measure_for_target(kl, tokens, AlgorithmConfig(kl_target_per=unit)) for unit in ("response", "token")
    )
    assert per_response == pytest.approx(5 / 3) and per_token == pytest.approx(0.08 / 3)
    coefficients = []
    for measured in (per_response, per_token):
        controller = AdaptiveKL(1.0, target=0.1, horizon=1000.0)
        controller.update(measured, 100)
        coefficients.append(controller.coef)
    assert coefficients == pytest.approx([1.02, 0.98]), "one target, and the coefficient moves the other way"
