# SPDX-License-Identifier: Apache-2.0
"""Preference losses against their formulas in plain floats, and their gradients against finite differences.

Not covered: their sums over microbatches and ranks (tests/run/test_preference.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.catalog import PREFERENCE_LOSSES
from megatron_rl.algorithms.preference_losses import ScoredResponses, compute_kto_loss, describe_margins
from megatron_rl.config.algorithm import PreferenceConfig

CONFIG = PreferenceConfig(beta=0.3, label_smoothing=0.1, simpo_gamma=0.4, center_coef=0.02, kto_weights=[1.0, 0.5])
CHOSEN = [(-4.0, 3, -3.5), (-9.0, 5, -9.2)]  # log-prob, tokens, log-prob of the reference
REJECTED = [(-6.0, 4, -5.0), (-2.0, 2, -2.5)]
MARGINS = [0.0, 0.2]


def _log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def _smoothed(x: float) -> float:
    return -0.9 * _log_sigmoid(x) - 0.1 * _log_sigmoid(-x)


def _log_odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


Side = tuple[float, int, float]
FORMULAS: dict[str, Callable[[Side, Side, float], float]] = {
    "dpo": lambda w, r, m: _smoothed(0.3 * ((w[0] - w[2]) - (r[0] - r[2])) - m),
    "robust": lambda w, r, m: (
        (0.1 * _log_sigmoid(m - (x := 0.3 * ((w[0] - w[2]) - (r[0] - r[2])))) - 0.9 * _log_sigmoid(x - m)) / 0.8
    ),
    "ipo": lambda w, r, m: ((w[0] - w[2]) / w[1] - (r[0] - r[2]) / r[1] - m - 1 / 0.6) ** 2,
    "simpo": lambda w, r, m: _smoothed(0.3 * (w[0] / w[1] - r[0] / r[1]) - 0.4 - m),
    "orpo": lambda w, r, m: -0.3 * _log_sigmoid(_log_odds(w[0] / w[1]) - _log_odds(r[0] / r[1]) - m),
    "bradley_terry": lambda w, r, m: _smoothed(w[0] - r[0] - m) + 0.02 * (w[0] + r[0]) ** 2,
}


def _gather(sides: list[Side]) -> ScoredResponses:
    scores, lengths, references = (torch.tensor(column, dtype=torch.float64) for column in zip(*sides, strict=True))
    return ScoredResponses(scores.requires_grad_(), lengths, references)


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_and_gradients(name: str) -> None:
    chosen, rejected, formula = _gather(CHOSEN), _gather(REJECTED), FORMULAS[name]
    loss, better, worse = PREFERENCE_LOSSES[name](chosen, rejected, torch.tensor(MARGINS), CONFIG)
    assert loss.tolist() == pytest.approx([*map(formula, CHOSEN, REJECTED, MARGINS)], rel=1e-7)
    loss.sum().backward()
    for i, (side, other) in enumerate(zip(CHOSEN, REJECTED, strict=True)):
        up, down = (formula((side[0] + step, *side[1:]), other, MARGINS[i]) for step in (1e-6, -1e-6))
        assert chosen.scores.grad is not None
        assert float(chosen.scores.grad[i]) == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-7)
    assert not better.requires_grad and not worse.requires_grad
    assert better[0] > worse[0] and better[1] < worse[1]


def test_kto() -> None:
    responses, labels = _gather([CHOSEN[0], REJECTED[0]]), torch.tensor([True, False])
    loss, rewards = compute_kto_loss(responses, labels, 0.25, CONFIG)
    ratios = [side[0] - side[2] for side in (CHOSEN[0], REJECTED[0])]
    expected = [
        1 - math.exp(_log_sigmoid(0.3 * (ratios[0] - 0.25))),
        0.5 * (1 - math.exp(_log_sigmoid(0.3 * (0.25 - ratios[1])))),
    ]
    assert loss.tolist() == pytest.approx(expected, rel=1e-7)
    assert rewards.tolist() == pytest.approx([0.3 * ratio for ratio in ratios], rel=1e-7)


def test_margins_accuracy_and_calibration() -> None:
    """Four pairs with the confidence 0.75, of which three are right, have no calibration error."""
    margin = math.log(3)
    found = describe_margins(np.array([margin, margin, margin, -margin]))
    assert found == pytest.approx({"accuracy": 0.75, "margin": margin / 2, "calibration_error": 0.0}, abs=1e-12)
    assert describe_margins(np.array([margin] * 4))["calibration_error"] == pytest.approx(0.25)
    assert describe_margins(np.zeros(3)) == {"accuracy": 0.5, "margin": 0.0, "calibration_error": 0.0}
