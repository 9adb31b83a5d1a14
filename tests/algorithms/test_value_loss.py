# SPDX-License-Identifier: Apache-2.0
"""The value loss against a loop with autograd, and the explained variance against its definition."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.training.roles.critic import compute_value_loss, finish_explained_variance

COUNT = 30
MASK = torch.arange(COUNT) % 3 > 0


def draw_tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values, old values, returns and weights; NaN at masked tokens (0 for the weights)."""
    generator = torch.Generator().manual_seed(0)
    values, old_values, returns, weights = torch.randn(4, COUNT, generator=generator, dtype=torch.float64)
    for x in (values, old_values, returns):
        x[~MASK] = float("nan")
    return values.requires_grad_(), old_values, returns, weights.abs() * MASK


@pytest.mark.parametrize("value_clip", [0.5, 0.1, None])
def test_loss_gradient_and_metrics_equal_the_loop(value_clip: float | None) -> None:
    values, old_values, returns, weights = draw_tokens()
    loss, metrics = compute_value_loss(values, old_values, returns, MASK, weights, value_clip)
    expected = torch.zeros((), dtype=torch.float64)
    sums = dict.fromkeys(("clipped", "tokens", "weights", "returns", "returns2", "error", "error2"), 0.0)
    for t in MASK.nonzero()[:, 0].tolist():
        value, old, target, weight = values[t], old_values[t], returns[t], weights[t]
        square = (value - target) ** 2
        if value_clip is not None:
            bounded = min(max(value, old - value_clip), old + value_clip)
            if (bounded - target) ** 2 > square:
                square = (bounded - target) ** 2
                sums["clipped"] += 1
        expected = expected + weight * square / 2
        error = (target - old).item()
        for name, x in (
            ("tokens", 1.0),
            ("weights", weight.item()),
            ("returns", target.item()),
            ("returns2", target.item() ** 2),
            ("error", error),
            ("error2", error**2),
        ):
            sums[name] += x
    [gradient] = torch.autograd.grad(expected, values)
    loss.backward()
    assert (sums["clipped"] > 0) == (value_clip is not None)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(values.grad, gradient)
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx({"loss": expected.item(), **sums}, rel=1e-6)
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (2.0, 2.0, 5.0, 4.5, -3.0, 0),
        (3.0, 2.0, 5.0, 3.125, 0.0, 1),  # moved by 1 in the right direction: only 0.5 counts, no more push
        (3.0, 2.0, 1.0, 2.0, 2.0, 0),  # moved away: pulled back
        (2.5, 2.0, 5.0, 3.125, -2.5, 0),  # on the bound
    ],
)
def test_by_hand(value: float, old: float, target: float, loss: float, gradient: float, clipped: int) -> None:
    values = torch.tensor([value], requires_grad=True)
    found, metrics = compute_value_loss(
        values, torch.tensor([old]), torch.tensor([target]), torch.tensor([True]), torch.ones(1), 0.5
    )
    found.backward()
    assert found.item() == loss and values.grad.item() == gradient and float(metrics["clipped"]) == clipped


def test_values_that_have_not_moved_are_not_clipped() -> None:
    """old + clamp(new - old) would differ from new by a rounding, and half of the tokens would seem clipped."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    old = values + 0.1
    ones = torch.ones(1000)
    _, metrics = compute_value_loss(values, old, torch.zeros(1000), ones.bool(), ones, 0.5)
    assert float(metrics["clipped"]) == 0.0


def test_microbatch_of_padding_adds_zero_and_is_connected() -> None:
    values, old_values, returns, _ = draw_tokens()
    loss, metrics = compute_value_loss(
        values, old_values, returns, torch.zeros(COUNT, dtype=torch.bool), torch.zeros(COUNT).double(), 0.5
    )
    loss.backward()
    assert loss.item() == 0.0 and not values.grad.any()
    assert {float(value) for value in metrics.values()} == {0.0}


def test_shapes_do_not_depend_on_values() -> None:
    """The meta device has shapes and no numbers; the capture of a CUDA graph itself is not covered."""
    values, old_values, returns, weights = (x.detach().to("meta") for x in draw_tokens())
    loss, _ = compute_value_loss(values.requires_grad_(), old_values, returns, MASK.to("meta"), weights, 0.5)
    loss.backward()


def explained_variance(old_values: list[float], returns: list[float]) -> float:
    """Compute the explained variance from the loss's metrics, added up over two microbatches."""
    totals: dict[str, float] = {}
    for part in (slice(0, 1), slice(1, None)):
        old, target = torch.tensor(old_values[part]), torch.tensor(returns[part])
        _, metrics = compute_value_loss(old, old, target, torch.ones(len(old)).bool(), torch.ones(len(old)), None)
        totals = {k: totals.get(k, 0.0) + float(v) for k, v in metrics.items()}
    return finish_explained_variance(totals)


@pytest.mark.parametrize(
    ("old_values", "returns", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 1.0),
        ([11.0, 12.0, 13.0], [1.0, 2.0, 3.0], 1.0),  # a constant is no variance
        ([0.0, 0.0, 0.0], [1.0, 2.0, 3.0], 0.0),
        ([3.0, 2.0, 1.0], [1.0, 2.0, 3.0], -3.0),
        ([1.0, 1.0, 3.0], [1.0, 2.0, 3.0], 1 - (2 / 9) / (2 / 3)),
        ([0.0, 5.0, 1.0], [0.1, 0.1, 0.1], 0.0),  # returns that do not vary
        ([0.0, 5.0] * 500, [0.1] * 1000, 0.0),  # and whose variance is not exactly 0 in float64
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 0.0),
        ([0.0, 5000.0, 10000.0], [1e4, 1e4 + 1, 1e4 + 2], -24989999.0),  # a small variance about a large mean
    ],
)
def test_explained_variance(old_values: list[float], returns: list[float], expected: float) -> None:
    found = explained_variance(old_values, returns)
    assert math.isfinite(found) and found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_explained_variance_of_no_tokens() -> None:
    assert finish_explained_variance(dict.fromkeys(("tokens", "returns", "returns2", "error", "error2"), 0.0)) == 0.0
