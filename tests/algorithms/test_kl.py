# SPDX-License-Identifier: Apache-2.0
"""KL estimators: their formulas by hand, and their expectation over a categorical distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms.kl import compute_kl

LOGPROB = st.floats(-20.0, 0.0)


@pytest.mark.parametrize(
    ("kl_type", "expected"),
    [("k1", [math.log(2), -math.log(3), 0.0]),
     ("k2", [math.log(2) ** 2 / 2, math.log(3) ** 2 / 2, 0.0]),
     ("k3", [0.5 - 1 + math.log(2), 3 - 1 - math.log(3), 0.0])],
)
def test_formula_by_hand(kl_type: str, expected: list[float]) -> None:
    """Ratios reference / policy of 1/2, 3 and 1."""
    logprobs = torch.tensor([0.5, 0.2, 0.7], dtype=torch.float64).log()
    ref_logprobs = torch.tensor([0.25, 0.6, 0.7], dtype=torch.float64).log()
    torch.testing.assert_close(
        compute_kl(logprobs, ref_logprobs, kl_type), torch.tensor(expected, dtype=torch.float64))


@given(LOGPROB, LOGPROB)
def test_k3_is_never_negative(logprob: float, ref_logprob: float) -> None:
    """In float32, where r - 1 - log r cancels for ratios near 1: within two roundings of |log r|."""
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


@pytest.mark.parametrize(("kl_type", "expected"), [("k1", 1.0), ("k2", math.log(2)), ("k3", 0.5)])
def test_gradient_by_hand(kl_type: str, expected: float) -> None:
    """With x = log p - log q = log 2: d k1 = 1, d k2 = x, d k3 = 1 - q/p = 1/2."""
    logprobs = torch.tensor([0.5], dtype=torch.float64).log().requires_grad_()
    compute_kl(logprobs, torch.tensor([0.25], dtype=torch.float64).log(), kl_type).sum().backward()
    assert float(logprobs.grad) == pytest.approx(expected)


def test_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kl_type 'k4'"):
        compute_kl(torch.zeros(1), torch.zeros(1), "k4")
