# SPDX-License-Identifier: Apache-2.0
"""Each policy-gradient term on numbers done by hand; the loop over packed sequences is in test_losses.py."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithms.catalog import POLICY_LOSSES
from megatron_rl.algorithms.losses import PolicyLossInputs, find_options
from megatron_rl.config.algorithm import AlgorithmConfig, DroOptions, SapoOptions

OLD = -1.0


def evaluate(
    name: str,
    ratios: list[float],
    advantages: list[float],
    ids: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
    options: DroOptions | SapoOptions | None = None,
    **settings: float,
) -> tuple[list[float], list[bool], list[float]]:
    """Token losses, whether clipped, and d(sum of token losses) / d logprobs of unmasked tokens."""
    old = torch.full((len(ratios),), OLD, dtype=dtype)
    logprobs = (old + torch.tensor(ratios, dtype=dtype).log()).requires_grad_()
    inputs = PolicyLossInputs(
        logprobs,
        old,
        torch.tensor(advantages, dtype=dtype),
        torch.ones(len(ratios), dtype=torch.bool),
        torch.tensor(ids or [0] * len(ratios)),
        options=options,
    )
    loss, is_clipped = POLICY_LOSSES[name](inputs, AlgorithmConfig(**settings))
    loss.sum().backward()
    return loss.tolist(), is_clipped.tolist(), logprobs.grad.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.3, 2.0, -2.5, 0.0, True),  # above 1 + 0.25 and wanted: no more push
        (1.3, -2.0, 2.6, 2.6, False),  # above and not wanted: pulled back
        (0.5, 2.0, -1.0, -1.0, False),  # below and wanted: pulled up
        (0.5, -2.0, 1.8, 0.0, True),  # below 1 - 0.1 and not wanted: no more push
        (0.5, 0.0, 0.0, 0.0, False),
    ],
)
@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_clip(name: str, ratio: float, advantage: float, loss: float, gradient: float, is_clipped: bool) -> None:
    """eps_low 0.1, eps_high 0.25. d loss / d logprob is -ratio * A for unclipped tokens, 0 for clipped ones.

    For gspo the sequence is one token with the ratio of the sequence.
    """
    found = evaluate(name, [ratio], [advantage], clip_eps_low=0.1, clip_eps_high=0.25)
    assert found == ([pytest.approx(loss)], [is_clipped], [pytest.approx(gradient)])


@pytest.mark.parametrize("name", ["ppo", "gspo"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        (5.0, -2.0, 6.0, 0.0, True),  # not more than 3 |A|
        (2.5, -2.0, 5.0, 5.0, False),
        (0.5, -2.0, 1.6, 0.0, True),  # the other clip is as before
        (5.0, 2.0, -2.4, 0.0, True),  # positive advantages too
        (0.1, 2.0, -0.2, -0.2, False),
    ],
)
def test_dual_clip(name: str, ratio: float, advantage: float, loss: float, gradient: float, is_clipped: bool) -> None:
    found = evaluate(name, [ratio], [advantage], dual_clip=3.0)
    assert found == ([pytest.approx(loss)], [is_clipped], [pytest.approx(gradient)])


@pytest.mark.parametrize("name", ["ppo", "gspo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_a_ratio_that_overflows_leaves_no_nan(name: str, advantage: float, dual_clip: float | None) -> None:
    """exp(100) is inf in float32; inf times the 0 gradient of a clipped branch would be NaN."""
    old, mask = torch.tensor([-101.0]), torch.ones(1, dtype=torch.bool)
    logprobs = torch.tensor([-1.0], requires_grad=True)
    inputs = PolicyLossInputs(logprobs, old, torch.tensor([advantage]), mask, torch.zeros(1, dtype=torch.int64))
    loss, _ = POLICY_LOSSES[name](inputs, AlgorithmConfig(dual_clip=dual_clip))
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.tolist() == [0.0]


def test_gspo_uses_the_geometric_mean_of_each_sequence() -> None:
    """Ratios 4, 1 (mean 2) and 1/8, 1, 1 (mean 1/2): the first is clipped, the second is not, whatever the tokens are.

    The gradient of the sum of the tokens' losses, -sum_t s A, has -s A for each token: 1/n of it each, n times.
    """
    loss, is_clipped, gradient = evaluate(
        "gspo",
        [4.0, 1.0, 0.125, 1.0, 1.0],
        [1.0, 1.0, 3.0, 3.0, 3.0],
        [7, 7, 2, 2, 2],
        clip_eps_low=0.1,
        clip_eps_high=0.5,
    )
    assert loss == pytest.approx([-1.5, -1.5, -1.5, -1.5, -1.5])
    assert is_clipped == [True, True, False, False, False]
    assert gradient == pytest.approx([0.0, 0.0, -1.5, -1.5, -1.5])


def test_gspo_does_not_count_masked_tokens_in_the_mean() -> None:
    """Prompt tokens come as zeros: the mean of the response's ratios 4 and 1 is 2, not the cube root of 4."""
    log_ratio = torch.tensor([0.0, math.log(4.0), 0.0], dtype=torch.float64)
    inputs = PolicyLossInputs(
        log_ratio,
        torch.zeros(3).double(),
        torch.tensor([0.0, -1.0, -1.0]).double(),
        torch.tensor([False, True, True]),
        torch.zeros(3, dtype=torch.int64),
    )
    loss, _ = POLICY_LOSSES["gspo"](inputs, AlgorithmConfig())
    assert loss.tolist() == pytest.approx([0.0, 2.0, 2.0])


def test_gspo_in_float32_is_exactly_one_at_the_first_update() -> None:
    loss, is_clipped, _ = evaluate(
        "gspo", [1.0] * 1000, [-1.0] * 1000, clip_eps_low=1e-7, clip_eps_high=1e-7, dtype=torch.float32
    )
    assert set(loss) == {1.0} and not any(is_clipped)


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    """Ratios 1/2, 1 and 4 with eps 0.2 and 1: weights 0.8, 1 and 2; the gradient is -weight A for all of them."""
    loss, is_clipped, gradient = evaluate(
        "cispo", [0.5, 1.0, 4.0], [2.0, -2.0, 1.0], clip_eps_low=0.2, clip_eps_high=1.0
    )
    logprobs = [OLD + math.log(0.5), OLD, OLD + math.log(4.0)]
    assert gradient == pytest.approx([-1.6, 2.0, -2.0])
    assert loss == pytest.approx([g * logprob for g, logprob in zip(gradient, logprobs, strict=True)])
    assert is_clipped == [True, False, True]


def test_a_ratio_that_overflows_leaves_other_losses_finite() -> None:
    """exp(100) in float32; clip_cov and kl_cov with every token chosen."""
    for name in POLICY_LOSSES:
        for advantage in (1.0, -1.0):
            for gap in (100.0, -100.0):
                logprobs = torch.tensor([-101.0 + gap / 2], requires_grad=True)
                inputs = PolicyLossInputs(
                    logprobs,
                    torch.tensor([-101.0 - gap / 2]),
                    torch.tensor([advantage]),
                    torch.ones(1).bool(),
                    torch.zeros(1).long(),
                    torch.ones(1).bool(),
                    find_options(AlgorithmConfig(), name),
                )
                loss, _ = POLICY_LOSSES[name](inputs, AlgorithmConfig())
                loss.sum().backward()
                assert loss.isfinite().all() and logprobs.grad.isfinite().all(), (name, advantage, gap)


def test_dro_by_hand() -> None:
    """Ratios 1 and e^2, beta 1/2, A = 3: losses -A log p and -A log p + 2^2 / 4, gradients -A and -A + 2 / 2."""
    loss, is_clipped, gradient = evaluate("dro", [1.0, math.exp(2)], [3.0, 3.0], options=DroOptions(0.5))
    assert loss == pytest.approx([3.0, -2.0]) and gradient == pytest.approx([-3.0, -2.0]) and not any(is_clipped)


def test_geo_mean_clips_each_token_before_the_mean() -> None:
    """Ratios 4 and 1/4 of a wanted response: log 4 is cut to 1/2, log 1/4 stays; the mean is (1/2 - log 4) / 2.

    The cut token has no gradient, the other one has all of it: -A s. Unwanted, the other one is cut at -1/4.
    """
    loss, is_clipped, gradient = evaluate("geo_mean", [4.0, 0.25], [2.0, 2.0], clip_eps_low=0.25, clip_eps_high=0.5)
    ratio = math.exp((0.5 - math.log(4)) / 2)
    assert loss == pytest.approx([-2 * ratio] * 2) and is_clipped == [True, False]
    assert gradient == pytest.approx([0.0, -2 * ratio])
    loss, is_clipped, gradient = evaluate("geo_mean", [4.0, 0.25], [-2.0, -2.0], clip_eps_low=0.25, clip_eps_high=0.5)
    ratio = math.exp((math.log(4) - 0.25) / 2)
    assert loss == pytest.approx([2 * ratio] * 2) and is_clipped == [False, True]
    assert gradient == pytest.approx([2 * ratio, 0.0])


def test_sapo_gates_smoothly() -> None:
    """f(r) = 4 / tau sigmoid(tau (r - 1)) is 2 / tau at r = 1, with slope 1; tau of 2 for A > 0, 1 else."""
    loss, is_clipped, gradient = evaluate("sapo", [1.0, 1.0, 2.0], [3.0, -3.0, 1.0], options=SapoOptions(2.0, 1.0))
    sigmoid = 1 / (1 + math.exp(-2))
    assert loss == pytest.approx([-3.0, 6.0, -2 * sigmoid]) and not any(is_clipped)
    assert gradient == pytest.approx([-3.0, 3.0, -2.0 * 4 * sigmoid * (1 - sigmoid)])


@pytest.mark.parametrize(("name", "low", "high"), [("dppo_tv", 0.2, 0.1), ("dppo_kl", 0.1, 0.05)])
def test_dppo_cuts_what_moved_too_far_and_would_move_further(name: str, low: float, high: float) -> None:
    """Old probability 1/e = 0.368: times 1.5 is 0.184 more (binary KL 0.068), half of it 0.184 less (0.094).

    Up is beyond its bound, down is not; a push back is never cut, and neither is a rare token whose ratio is 4.
    """
    loss, is_cut, gradient = evaluate(
        name, [1.5, 0.5, 1.5, 0.5], [1.0, -1.0, -1.0, 1.0], clip_eps_low=low, clip_eps_high=high
    )
    assert is_cut == [True, False, False, False] and loss[0] == 0.0
    assert gradient == pytest.approx([0.0, 0.5, 1.5, -0.5])
    rare = PolicyLossInputs(
        torch.tensor([-8.0]).requires_grad_(),
        torch.tensor([-8.0 - math.log(4)]),
        torch.ones(1),
        torch.ones(1).bool(),
        torch.zeros(1).long(),
    )
    for dual_clip, weight in ((None, 4.0), (3.0, 3.0)):
        loss, is_cut = POLICY_LOSSES[name](
            rare, AlgorithmConfig(clip_eps_low=low, clip_eps_high=high, dual_clip=dual_clip)
        )
        assert not is_cut.any() and loss.item() == pytest.approx(8 * weight)


def test_policy_gradient_knows_no_ratio() -> None:
    loss, is_clipped, gradient = evaluate("policy_gradient", [0.5, 4.0], [2.0, -3.0])
    assert gradient == pytest.approx([-2.0, 3.0]) and is_clipped == [False, False]
    assert loss == pytest.approx([-2.0 * (OLD + math.log(0.5)), 3.0 * (OLD + math.log(4.0))])
