# SPDX-License-Identifier: Apache-2.0
"""The losses against a loop over tokens in plain Python, their gradients by hand, and masked tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from megatron_rl.algorithms.losses import compute_policy_loss, compute_sft_loss
from megatron_rl.config.schema import AlgorithmConfig


@dataclass
class Tokens:
    """The token-level inputs of the loss; float64, so that comparisons are tight."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor

    def loss(self, config: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return compute_policy_loss(
            self.logprobs, self.entropy, self.old_logprobs, self.ref_logprobs, self.advantages, self.loss_mask,
            self.loss_weights, config)


def make_tokens(ratios: list[float], advantages: list[float]) -> Tokens:
    """Unmasked tokens of weight 1 with these ratios."""
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    ones = torch.ones_like(old)
    return Tokens(logprobs, (0.5 * ones).requires_grad_(), old, None, torch.tensor(advantages, dtype=torch.float64),
                  ones.bool(), ones)


def random_tokens(count: int = 40) -> Tokens:
    """A third is masked and has weight 0; ratios reach far beyond the clip range."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    mask = torch.arange(count) % 3 > 0
    return Tokens((draw() - 3).requires_grad_(), draw().abs().requires_grad_(), draw() * 0.3 - 3, draw() * 0.3 - 3,
                  draw(), mask, draw().abs() * mask)


def loss_by_loop(tokens: Tokens, config: AlgorithmConfig) -> dict[str, float]:
    """PPO's clipped surrogate with a k3 KL and an entropy bonus, one token after the other."""
    sums = {"loss": 0.0, "kl": 0.0, "entropy": 0.0, "clipped": 0.0, "tokens": 0.0, "max/deviation": 0.0}
    for t in range(len(tokens.logprobs)):
        if not tokens.loss_mask[t]:
            continue
        logprob, old, advantage = (
            x[t].item() for x in (tokens.logprobs, tokens.old_logprobs, tokens.advantages))
        ratio = math.exp(logprob - old)
        bounded = min(max(ratio, 1 - config.clip_eps_low), 1 + config.clip_eps_high)
        surrogate = min(ratio * advantage, bounded * advantage)
        kl = 0.0
        if tokens.ref_logprobs is not None:
            log_r = tokens.ref_logprobs[t].item() - logprob
            kl = math.exp(log_r) - 1 - log_r
        entropy = tokens.entropy[t].item()
        token_loss = -surrogate + config.kl_coef * kl - config.entropy_coef * entropy
        sums["loss"] += tokens.loss_weights[t].item() * token_loss
        sums["kl"] += kl
        sums["entropy"] += entropy
        sums["clipped"] += float(bounded * advantage < ratio * advantage)
        sums["tokens"] += 1
        sums["max/deviation"] = max(sums["max/deviation"], abs(logprob - old))
    return sums


CONFIGS = {
    "plain": AlgorithmConfig(),
    "clip-higher": AlgorithmConfig(clip_eps_low=0.1, clip_eps_high=0.4),
    "kl": AlgorithmConfig(kl_coef=0.3),
    "entropy": AlgorithmConfig(entropy_coef=0.2),
    "all": AlgorithmConfig(clip_eps_low=0.3, clip_eps_high=0.1, kl_coef=0.7, entropy_coef=0.1),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("has_reference", [True, False])
def test_loss_and_metrics_equal_the_loop(name: str, has_reference: bool) -> None:
    tokens, config = random_tokens(), CONFIGS[name]
    if not has_reference:
        tokens, config = replace(tokens, ref_logprobs=None), replace(config, kl_coef=0.0)
    loss, metrics = tokens.loss(config)
    expected = loss_by_loop(tokens, config)
    assert expected["clipped"] > 0, "the random tokens must reach the clip range"
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-10)
    assert {key: float(value) for key, value in metrics.items()} == pytest.approx(expected, rel=1e-6)
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.3, 2.0, -2.5, 0.0, 1),  # above 1 + 0.25 and wanted: no more push
        (1.3, -2.0, 2.6, 2.6, 0),  # above and not wanted: pulled back
        (0.5, 2.0, -1.0, -1.0, 0),  # below and wanted: pulled up
        (0.5, -2.0, 1.8, 0.0, 1),  # below 1 - 0.1 and not wanted: no more push
        (0.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_clip_by_hand(ratio: float, advantage: float, loss: float, gradient: float, is_clipped: int) -> None:
    """eps_low 0.1, eps_high 0.25. Where not clipped, d loss / d logprob = -ratio * A; where clipped it is 0."""
    tokens = make_tokens([ratio], [advantage])
    found, metrics = tokens.loss(AlgorithmConfig(clip_eps_low=0.1, clip_eps_high=0.25))
    found.backward()
    assert found.item() == pytest.approx(loss) and float(metrics["clipped"]) == is_clipped
    assert float(tokens.logprobs.grad) == pytest.approx(gradient)


def test_first_update_is_the_policy_gradient() -> None:
    """At ratio 1 the gradient is -w A, and the deviation that is logged is exactly 0."""
    tokens = random_tokens()
    tokens.old_logprobs = tokens.logprobs.detach().clone()
    loss, metrics = tokens.loss(AlgorithmConfig())
    loss.backward()
    torch.testing.assert_close(tokens.logprobs.grad, -tokens.loss_weights * tokens.advantages)
    assert float(metrics["max/deviation"]) == 0.0 and float(metrics["clipped"]) == 0.0


def test_gradient_of_kl_and_entropy_terms_by_hand() -> None:
    """Zero advantages leave w (kl_coef (1 - q/p)) for the logprobs and -w entropy_coef for the entropy."""
    tokens = make_tokens([1.0, 1.0], [0.0, 0.0])
    tokens.ref_logprobs = tokens.logprobs.detach() + torch.tensor([math.log(3.0), math.log(0.5)])
    tokens.loss_weights = torch.tensor([2.0, 4.0], dtype=torch.float64)
    loss, _ = tokens.loss(AlgorithmConfig(kl_coef=0.1, entropy_coef=0.01))
    loss.backward()
    torch.testing.assert_close(
        tokens.logprobs.grad, torch.tensor([2 * 0.1 * (1 - 3), 4 * 0.1 * 0.5], dtype=torch.float64))
    torch.testing.assert_close(tokens.entropy.grad, torch.tensor([-0.02, -0.04], dtype=torch.float64))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
def test_masked_tokens_enter_nothing(garbage: float) -> None:
    """Whatever stands at masked positions of the inputs, loss, gradients and metrics stay as they are.

    Does not cover garbage in loss_weights, which are 0 there by construction (tests/data/test_batching.py).
    """
    clean, dirty, config = random_tokens(), random_tokens(), CONFIGS["all"]
    for name in ("old_logprobs", "ref_logprobs", "advantages"):
        getattr(dirty, name)[~dirty.loss_mask] = garbage
    (loss, metrics), (dirty_loss, dirty_metrics) = clean.loss(config), dirty.loss(config)
    loss.backward()
    dirty_loss.backward()
    assert torch.equal(loss, dirty_loss)
    assert torch.equal(clean.logprobs.grad, dirty.logprobs.grad) and not dirty.logprobs.grad[~dirty.loss_mask].any()
    assert torch.equal(clean.entropy.grad, dirty.entropy.grad)
    assert {k: float(v) for k, v in metrics.items()} == {k: float(v) for k, v in dirty_metrics.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_microbatch_of_padding_adds_zero(name: str) -> None:
    """Loss 0, and still connected to the model: its backward runs the same collectives as the others'."""
    tokens = random_tokens()
    tokens.loss_mask, tokens.loss_weights = torch.zeros(40, dtype=torch.bool), torch.zeros(40, dtype=torch.float64)
    loss, metrics = tokens.loss(CONFIGS[name])
    loss.backward()
    assert loss.item() == 0.0 and not tokens.logprobs.grad.any()
    assert {float(value) for value in metrics.values()} == {0.0}


def test_sft_loss_by_hand() -> None:
    logprobs = torch.tensor([-9.0, -1.0, -2.0, float("nan")], requires_grad=True)
    mask, weights = torch.tensor([False, True, True, False]), torch.tensor([0.0, 0.5, 0.25, 0.0])
    loss, metrics = compute_sft_loss(logprobs, mask, weights)
    loss.backward()
    assert loss.item() == 1.0 and float(metrics["loss"]) == 1.0 and float(metrics["tokens"]) == 2.0
    assert logprobs.grad.tolist() == [0.0, -0.5, -0.25, 0.0]
