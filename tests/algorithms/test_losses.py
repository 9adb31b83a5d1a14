# SPDX-License-Identifier: Apache-2.0
"""The policy losses against a loop over tokens with autograd, their terms by hand, masked tokens, fixed shapes.

Everything is float64, so that comparisons are tight. Particular cases of each formula are in test_policy_losses.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megatron_rl.algorithms.catalog import POLICY_LOSSES
from megatron_rl.algorithms.losses import (
    PolicyLossInputs,
    compute_policy_loss,
    register_policy_loss,
)
from megatron_rl.config.algorithm import AlgorithmConfig, DroOptions, SapoOptions
from megatron_rl.training.given_losses import compute_sft_loss
from megatron_rl.types import UserError

LENGTHS = [9, 4, 12, 7, 5]  # of packed sequences, their first two tokens being the prompt
TRUNCATED = 3  # this one is masked as a whole
PADDING = 3
COUNT = sum(LENGTHS) + PADDING


@dataclass
class Tokens:
    """The token-level arguments of the loss."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    importance_weights: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor
    sequence_ids: torch.Tensor

    def loss(self, config: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        inputs = PolicyLossInputs(self.logprobs, self.old_logprobs, self.advantages, self.loss_mask, self.sequence_ids)
        return compute_policy_loss(
            inputs, self.entropy, self.ref_logprobs, self.importance_weights, self.loss_weights, config
        )


def make_tokens(ratios: list[float], advantages: list[float]) -> Tokens:
    """Unmasked tokens of one sequence, of weight 1, with these ratios."""
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    ones = torch.ones_like(old)
    return Tokens(
        logprobs,
        (0.5 * ones).requires_grad_(),
        old,
        None,
        None,
        torch.tensor(advantages, dtype=torch.float64),
        ones.bool(),
        ones,
        torch.zeros_like(ones).long(),
    )


def random_tokens(spread: float = 1.0) -> Tokens:
    """Five packed sequences and padding; ratios reach far beyond the clip range for a spread of 1.

    Advantages and loss weights are constant in a sequence, as outcome rewards and the modes of aggregation make
    them; half of the responses have negative advantages.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(count: int = COUNT) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([*LENGTHS, PADDING])
    ids = torch.repeat_interleave(torch.tensor([3, 0, 4, 1, 2, -1]), lengths)
    mask = torch.cat([torch.arange(n) >= 2 for n in LENGTHS] + [torch.zeros(PADDING, dtype=torch.bool)])
    mask &= ids != torch.tensor([3, 0, 4, 1, 2])[TRUNCATED]
    advantages = torch.tensor([1.5, -0.5, 0.7, 2.0, -1.0, 0.0], dtype=torch.float64).repeat_interleave(lengths)
    weights = draw(6).abs().repeat_interleave(lengths)
    old = draw() * 0.3 - 3
    return Tokens(
        (old + spread * draw()).requires_grad_(),
        draw().abs().requires_grad_(),
        old,
        draw() * 0.3 - 3,
        draw().abs(),
        advantages,
        mask,
        weights * mask,
        ids,
    )


def token_loss_by_loop(tokens: Tokens, t: int, config: AlgorithmConfig) -> tuple[torch.Tensor, bool]:
    """The policy-gradient term of one token from its definition, differentiable, and whether it is clipped."""
    low, high = 1 - config.clip_eps_low, 1 + config.clip_eps_high
    logprob, old, advantage = tokens.logprobs[t], tokens.old_logprobs[t], tokens.advantages[t].item()
    if config.policy_loss == "policy_gradient":
        return -advantage * logprob, False
    if config.policy_loss == "dro":
        return -advantage * logprob + config.options["dro"].beta / 2 * (logprob - old) ** 2, False
    if config.policy_loss == "cispo":
        ratio = math.exp(logprob.item() - old.item())
        return -min(max(ratio, low), high) * advantage * logprob, not low <= ratio <= high
    ratio = (logprob - old).exp()
    if config.policy_loss == "sapo":
        tau = config.options["sapo"].tau_pos if advantage > 0 else config.options["sapo"].tau_neg
        return -advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp()), False
    if config.policy_loss.startswith("dppo"):
        p, q = math.exp(logprob.item()), math.exp(old.item())
        divergence = abs(p - q)
        if config.policy_loss == "dppo_kl":
            divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        is_cut = (
            (p > q and divergence > config.clip_eps_high)
            if advantage > 0
            else (p < q and divergence > config.clip_eps_low)
        )
        weight = min(p / q, config.dual_clip or math.inf)
        return (0.0 if is_cut else -weight * advantage) * logprob, is_cut
    mine = [u for u in range(COUNT) if tokens.sequence_ids[u] == tokens.sequence_ids[t] and tokens.loss_mask[u]]
    if config.policy_loss == "geo_mean":
        kept = [_bound_outwards(tokens, u, config) for u in mine]
        is_clipped = bool(_bound_outwards(tokens, t, config) != logprob - old)
        return -advantage * (sum(kept) / len(kept)).exp(), is_clipped
    if config.policy_loss == "gspo":
        ratio = (sum(tokens.logprobs[u] - tokens.old_logprobs[u] for u in mine) / len(mine)).exp()
    bounded = min(max(ratio, ratio.new_tensor(low)), ratio.new_tensor(high))
    surrogate, is_clipped = ratio * advantage, False
    if bounded * advantage < surrogate:
        surrogate, is_clipped = bounded * advantage, True
    if config.dual_clip is not None and advantage < 0 and surrogate < config.dual_clip * advantage:
        surrogate, is_clipped = ratio.new_tensor(config.dual_clip * advantage), True
    return -surrogate, is_clipped


def _bound_outwards(tokens: Tokens, t: int, config: AlgorithmConfig) -> torch.Tensor:
    """The log-ratio of a token, bounded on the side to which its advantage pushes."""
    log_ratio = tokens.logprobs[t] - tokens.old_logprobs[t]
    if tokens.advantages[t] > 0:
        return log_ratio.clamp(max=config.clip_eps_high)
    return log_ratio.clamp(min=-config.clip_eps_low)


def loss_by_loop(tokens: Tokens, config: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute the whole loss and its metrics, one token after the other."""
    names = ("policy", "kl_term", "entropy_term", "kl", "clipped", "clipped_low", "tokens", "weights")
    sums: dict[str, torch.Tensor] = {name: torch.zeros((), dtype=torch.float64) for name in (*names, "entropy")}
    deviation = 0.0
    for t in range(COUNT):
        if not tokens.loss_mask[t]:
            continue
        weight, entropy, logprob = tokens.loss_weights[t], tokens.entropy[t], tokens.logprobs[t]
        token_loss, is_clipped = token_loss_by_loop(tokens, t, config)
        if tokens.importance_weights is not None:
            token_loss = token_loss * tokens.importance_weights[t]
        sums["policy"] = sums["policy"] + weight * token_loss
        if tokens.ref_logprobs is not None:
            log_r = tokens.ref_logprobs[t] - logprob
            kl = log_r.exp() - 1 - log_r
            sums["kl"] += kl.detach()
            if config.kl_in == "loss":
                sums["kl_term"] = sums["kl_term"] + weight * config.kl_coef * kl
        sums["entropy_term"] = sums["entropy_term"] - weight * config.entropy_coef * entropy
        sums["entropy"] += entropy.detach()
        sums["clipped"] += is_clipped
        sums["clipped_low"] += is_clipped and bool(logprob < tokens.old_logprobs[t])
        sums["tokens"] += 1
        sums["weights"] += weight
        deviation = max(deviation, abs((logprob - tokens.old_logprobs[t]).item()))
    loss = sums["policy"] + sums["kl_term"] + sums["entropy_term"]
    return loss, {"loss": loss.item(), "max/deviation": deviation, **{k: v.item() for k, v in sums.items()}}


CONFIGS = {
    "ppo": AlgorithmConfig(),
    "ppo, clip-higher": AlgorithmConfig(clip_eps_low=0.1, clip_eps_high=0.4),
    "ppo, dual clip": AlgorithmConfig(dual_clip=1.5),
    "ppo, kl": AlgorithmConfig(kl_coef=0.3),
    "ppo, kl in the reward": AlgorithmConfig(kl_coef=0.3, kl_in="reward"),
    "ppo, entropy": AlgorithmConfig(entropy_coef=0.2),
    "gspo": AlgorithmConfig(policy_loss="gspo", clip_eps_low=0.05, clip_eps_high=0.1),
    "gspo, all": AlgorithmConfig(policy_loss="gspo", clip_eps_low=0.01, dual_clip=1.1, kl_coef=0.7, entropy_coef=0.1),
    "cispo": AlgorithmConfig(policy_loss="cispo", clip_eps_low=0.9),
    "cispo, all": AlgorithmConfig(policy_loss="cispo", kl_coef=0.7, entropy_coef=0.1),
    "geo_mean": AlgorithmConfig(policy_loss="geo_mean", clip_eps_low=0.4, clip_eps_high=0.3, kl_coef=0.1),
    "sapo": AlgorithmConfig(policy_loss="sapo", options={"sapo": SapoOptions(0.8, 2.0)}, entropy_coef=0.1),
    "dppo_tv": AlgorithmConfig(policy_loss="dppo_tv", clip_eps_low=0.01, clip_eps_high=0.03, dual_clip=2.0),
    "dppo_kl": AlgorithmConfig(policy_loss="dppo_kl", clip_eps_low=0.01, clip_eps_high=0.02),
    "dro": AlgorithmConfig(policy_loss="dro", options={"dro": DroOptions(0.7)}, kl_coef=0.1, entropy_coef=0.1),
    "policy_gradient": AlgorithmConfig(policy_loss="policy_gradient", kl_coef=0.1, entropy_coef=0.1),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("has_reference", [True, False])
@pytest.mark.parametrize("has_importance", [True, False])
def test_loss_gradients_and_metrics_equal_the_loop(name: str, has_reference: bool, has_importance: bool) -> None:
    """GSPO's loop differentiates through the true ratio of the sequence: its stop-gradient form gives the same."""
    tokens, config = random_tokens(), CONFIGS[name]
    if not has_reference:
        tokens = replace(tokens, ref_logprobs=None)
    if not has_importance:
        tokens = replace(tokens, importance_weights=None)
    elif config.policy_loss in ("gspo", "geo_mean"):  # per-token weights would weight shares of the sequence's gradient
        tokens.importance_weights = torch.full((COUNT,), 0.7, dtype=torch.float64)
    expected, expected_metrics = loss_by_loop(tokens, config)
    gradients = torch.autograd.grad(expected, [tokens.logprobs, tokens.entropy], allow_unused=True)
    loss, metrics = tokens.loss(config)
    found = torch.autograd.grad(loss, [tokens.logprobs, tokens.entropy], allow_unused=True)
    if config.policy_loss not in ("policy_gradient", "sapo", "dro"):
        assert expected_metrics["clipped"] > 0, "the random tokens must reach the clip range"
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    torch.testing.assert_close(found[0], gradients[0])
    if config.entropy_coef:
        torch.testing.assert_close(found[1], gradients[1])
    assert {key: float(value) for key, value in metrics.items()} == pytest.approx(expected_metrics, rel=1e-6)
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_terms_add_up(name: str) -> None:
    _, metrics = random_tokens().loss(CONFIGS[name])
    terms = metrics["policy"] + metrics["kl_term"] + metrics["entropy_term"]
    assert float(metrics["loss"]) == pytest.approx(float(terms), rel=1e-12)


def test_the_deviation_is_of_either_direction() -> None:
    """Log-probs that have fallen by log 2 and risen by log 1.5."""
    _, metrics = make_tokens([0.5, 1.5], [1.0, 1.0]).loss(AlgorithmConfig())
    assert float(metrics["max/deviation"]) == pytest.approx(math.log(2))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_first_update_is_the_policy_gradient(name: str) -> None:
    """At ratio 1 the gradient of every loss is -w A, and the deviation that is logged is exactly 0."""
    tokens = random_tokens()
    tokens.old_logprobs, tokens.importance_weights = tokens.logprobs.detach().clone(), None
    loss, metrics = tokens.loss(AlgorithmConfig(policy_loss=name, dual_clip=3.0))
    loss.backward()
    torch.testing.assert_close(tokens.logprobs.grad, -tokens.loss_weights * tokens.advantages)
    assert float(metrics["max/deviation"]) == 0.0 and float(metrics["clipped"]) == 0.0


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_loss_is_the_same_for_every_split_into_microbatches(name: str) -> None:
    """Sequences are whole in a microbatch; loss and gradients summed over two microbatches equal the undivided ones."""
    whole, parts, config = random_tokens(), random_tokens(), AlgorithmConfig(policy_loss=name, kl_coef=0.1)
    loss, _ = whole.loss(config)
    loss.backward()
    cut, total = LENGTHS[0] + LENGTHS[1], 0.0
    for part in (slice(0, cut), slice(cut, COUNT)):
        tensors = {field: value[part] for field, value in vars(parts).items()}
        part_loss, _ = Tokens(**tensors).loss(config)
        part_loss.backward()
        total += part_loss.item()
    assert total == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(parts.logprobs.grad, whole.logprobs.grad, rtol=1e-12, atol=1e-15)


def test_gradient_of_kl_and_entropy_terms_by_hand() -> None:
    """Zero advantages leave w (kl_coef (1 - q/p)) for the logprobs and -w entropy_coef for the entropy."""
    tokens = make_tokens([1.0, 1.0], [0.0, 0.0])
    tokens.ref_logprobs = tokens.logprobs.detach() + torch.tensor([math.log(3.0), math.log(0.5)])
    tokens.loss_weights = torch.tensor([2.0, 4.0], dtype=torch.float64)
    loss, _ = tokens.loss(AlgorithmConfig(kl_coef=0.1, entropy_coef=0.01))
    loss.backward()
    torch.testing.assert_close(
        tokens.logprobs.grad, torch.tensor([2 * 0.1 * (1 - 3), 4 * 0.1 * 0.5], dtype=torch.float64)
    )
    torch.testing.assert_close(tokens.entropy.grad, torch.tensor([-0.02, -0.04], dtype=torch.float64))


def test_importance_weights_scale_the_policy_term_only() -> None:
    """A weight of 0 leaves the KL and entropy terms of its token, and the token in all counts."""
    tokens, config = random_tokens(), AlgorithmConfig(kl_coef=0.3, entropy_coef=0.1)
    tokens.importance_weights = torch.zeros(COUNT, dtype=torch.float64)
    _, found = tokens.loss(config)
    tokens.importance_weights = None
    _, plain = tokens.loss(config)
    assert float(found["policy"]) == 0.0 and float(plain["policy"]) != 0.0
    assert all(torch.equal(found[key], plain[key]) for key in plain.keys() - {"policy", "loss"})


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
def test_masked_tokens_enter_nothing(garbage: float, name: str) -> None:
    """Whatever stands at masked positions of the inputs, loss, gradients and metrics stay as they are.

    Does not cover garbage in loss_weights, which are 0 there by construction (tests/samples/test_batch.py).
    """
    clean, dirty, config = random_tokens(), random_tokens(), CONFIGS[name]
    for field in ("old_logprobs", "ref_logprobs", "advantages", "importance_weights"):
        getattr(dirty, field)[~dirty.loss_mask] = garbage
    with torch.no_grad():
        dirty.logprobs[~dirty.loss_mask] = garbage
        dirty.entropy[~dirty.loss_mask] = garbage
    (loss, metrics), (dirty_loss, dirty_metrics) = clean.loss(config), dirty.loss(config)
    loss.backward()
    dirty_loss.backward()
    assert torch.equal(loss, dirty_loss)
    assert torch.equal(clean.logprobs.grad, dirty.logprobs.grad) and not dirty.logprobs.grad[~dirty.loss_mask].any()
    if config.entropy_coef:
        assert torch.equal(clean.entropy.grad, dirty.entropy.grad)
    assert {k: float(v) for k, v in metrics.items()} == {k: float(v) for k, v in dirty_metrics.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_microbatch_of_padding_adds_zero(name: str) -> None:
    """Loss 0, and still connected to the model: its backward runs the same collectives as the others'."""
    tokens = random_tokens()
    tokens.loss_mask, tokens.sequence_ids = torch.zeros(COUNT, dtype=torch.bool), torch.full((COUNT,), -1)
    tokens.loss_weights = torch.zeros(COUNT, dtype=torch.float64)
    loss, metrics = tokens.loss(CONFIGS[name])
    loss.backward()
    assert loss.item() == 0.0 and not tokens.logprobs.grad.any()
    assert {float(value) for value in metrics.values()} == {0.0}


def run_without_values(config: AlgorithmConfig) -> None:
    """Forward and backward on the meta device: shapes without numbers; looking at a number raises."""
    fields = {
        name: value.detach().to("meta").requires_grad_(value.requires_grad)
        for name, value in vars(random_tokens()).items()
    }
    loss, _ = Tokens(**fields).loss(config)
    loss.backward()


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_do_not_depend_on_values(name: str) -> None:
    """A requirement of CUDA graphs; the capture itself is not covered."""
    run_without_values(CONFIGS[name])


@pytest.mark.usefixtures("registry")
def test_shapes_that_depend_on_values_would_be_noticed() -> None:
    @register_policy_loss("selects")
    def compute(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
        inputs.logprobs[inputs.loss_mask].mean()
        return -inputs.logprobs, torch.zeros_like(inputs.loss_mask)

    with pytest.raises((RuntimeError, NotImplementedError)):
        run_without_values(AlgorithmConfig(policy_loss="selects"))


def test_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match='"gpo" is not known(.|\n)*cispo, clip_cov, dppo_kl, dppo_tv, dro, geo_mean, '):
        random_tokens().loss(AlgorithmConfig(policy_loss="gpo"))


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("compute", "found"),
    [
        (
            lambda x: (x.logprobs.mean(), x.loss_mask),
            r"\[\] float64, \[40\] bool",
        ),  # would be divided by the tokens twice
        (
            lambda x: (x.logprobs, x.loss_mask, {"mean": x.logprobs.mean(), "of": 1.0}),
            r"\[40\] float64, \[40\] bool, mean: \[\] float64, of: float",
        ),
        (lambda x: (x.logprobs, x.loss_mask, []), r"\[40\] float64, \[40\] bool, list"),
        (lambda x: (x.logprobs, x.logprobs), r"\[40\] float64, \[40\] float64"),
        (lambda x: (x.logprobs,), r"\[40\] float64$"),
        (lambda x: x.logprobs, r"\[40\] float64$"),
        (lambda x: (x.logprobs, False), r"\[40\] float64, bool"),
        (lambda x: None, "NoneType"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused(compute: Any, found: str) -> None:
    register_policy_loss("odd")(lambda inputs, config: compute(inputs))
    with pytest.raises(UserError, match=f'(?m)"odd" returned {found}'):
        random_tokens().loss(AlgorithmConfig(policy_loss="odd"))


@pytest.mark.usefixtures("registry")
def test_what_a_loss_reports_is_summed_over_the_tokens_in_the_loss() -> None:
    """Garbage at masked positions is dropped, a bool counts, and nothing of it has a gradient."""
    register_policy_loss("talking")(
        lambda x, config: (
            -x.logprobs,
            x.loss_mask & False,
            {"ratio": torch.where(x.loss_mask, 2.0 * x.logprobs, float("nan")), "positive": x.advantages > 0},
        )
    )
    tokens = random_tokens()
    loss, metrics = tokens.loss(AlgorithmConfig(policy_loss="talking"))
    inside = tokens.loss_mask
    assert float(metrics["loss/talking/ratio"]) == pytest.approx(2.0 * float(tokens.logprobs[inside].detach().sum()))
    assert float(metrics["loss/talking/positive"]) == int((tokens.advantages[inside] > 0).sum()) > 0
    assert not any(value.requires_grad for value in metrics.values()) and loss.requires_grad


def test_sft_loss_by_hand() -> None:
    logprobs = torch.tensor([-9.0, -1.0, -2.0, float("nan")], requires_grad=True)
    mask, weights = torch.tensor([False, True, True, False]), torch.tensor([0.0, 0.5, 0.25, 0.0])
    loss, metrics = compute_sft_loss(logprobs, mask, weights)
    loss.backward()
    assert loss.item() == 1.0 and float(metrics["loss"]) == 1.0 and float(metrics["tokens"]) == 2.0
    assert logprobs.grad.tolist() == [0.0, -0.5, -0.25, 0.0]
