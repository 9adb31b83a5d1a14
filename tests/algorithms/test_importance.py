# SPDX-License-Identifier: Apache-2.0
"""The gap between trainer and engine: its metrics and the importance weights, by hand and against a loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_rl.algorithms.importance import (
    Responses,
    compute_importance_weights,
    finish_importance_weights,
    normalize_weights,
)
from megatron_rl.algorithms.losses import has_importance_weights
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.samples.experience import finish_mismatch, sum_mismatch

IDS = torch.tensor([5, 5, 5, 5, 2, 2, 2, 7, 7, -1, -1, 9, 9, 9])
MASK = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1], dtype=torch.bool)  # 7 is masked as a whole
RATIOS = [9.0, 4.0, 1.0, 2.0, 9.0, 0.25, 1.0, 8.0, 9.0, 7.0, 7.0, 9.0, 1.5, 0.75]
LOG2 = math.log(2)


def compute(ratios: list[float] = RATIOS, **settings: Any) -> tuple[torch.Tensor, dict[str, float]]:
    rollout = torch.full((len(ratios),), -3.0)
    return compute_importance_weights(
        rollout + torch.tensor(ratios).log(), rollout, MASK, Responses.of_sequences(IDS), AlgorithmConfig(**settings)
    )


def weights_by_loop(**settings: Any) -> list[float]:
    """Compute importance weights by definition, one token after the other."""
    config, weights = AlgorithmConfig(**settings), []
    low, high, mode = config.importance_low, config.importance_high, config.importance_sampling
    for t, (i, is_in_loss) in enumerate(zip(IDS.tolist(), MASK.tolist(), strict=True)):
        mine = [RATIOS[u] for u in range(len(RATIOS)) if IDS[u] == i and MASK[u]]
        weight = RATIOS[t]
        if mode.startswith("sequence") and mine:
            weight = math.prod(mine) ** (1 / len(mine))
        if mode.startswith("product") and mine:
            weight = math.prod(mine)
        if mode.endswith("truncate"):
            weight = min(weight, high)
        elif mode.endswith("mask"):
            weight = weight if low <= weight <= high else 0.0
        else:
            weight = 1.0
        threshold = config.reject_sequence_above
        if threshold is not None and any(abs(math.log(ratio)) > threshold for ratio in mine):
            weight = 0.0
        weights.append(weight if is_in_loss else 0.0)
    return weights


@pytest.mark.parametrize(
    "mode",
    ["none", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask", "product-truncate", "product-mask"],
)
@pytest.mark.parametrize("threshold", [None, 0.5, 1.3])
@pytest.mark.parametrize("bounds", [(0.5, 1.9), (0.8, 1.1)])
def test_weights_equal_the_loop(mode: str, threshold: float | None, bounds: tuple[float, float]) -> None:
    settings = dict(
        importance_sampling=mode, reject_sequence_above=threshold, importance_low=bounds[0], importance_high=bounds[1]
    )
    assert has_importance_weights(AlgorithmConfig(**settings)) == (mode != "none" or threshold is not None)
    weights, sums = compute(**settings)
    assert weights.dtype == torch.float32 and weights.tolist() == pytest.approx(weights_by_loop(**settings), rel=1e-5)
    assert sums["weight"] == pytest.approx(sum(weights_by_loop(**settings)), rel=1e-5)
    assert (sums["tokens"], sums["sequences"]) == (7, 3)


def test_counts_by_hand() -> None:
    """Seven tokens of three responses with ratios 4, 1, 2 | 1/4, 1 | 3/2, 3/4."""
    _, token = compute(importance_sampling="token-truncate", importance_high=1.75, reject_sequence_above=1.3)
    assert (token["truncated"], token["masked"], token["rejected"]) == (2, 0, 2)
    _, mask = compute(importance_sampling="token-mask", importance_low=0.5, importance_high=1.75)
    assert (mask["truncated"], mask["masked"], mask["rejected"]) == (0, 3, 0)
    _, sequence = compute(importance_sampling="sequence-truncate", importance_high=1.75)  # means 2, 1/2, 1.06
    assert (sequence["truncated"], sequence["masked"], sequence["rejected"]) == (3, 0, 0)
    _, sequence = compute(importance_sampling="sequence-mask", importance_low=0.6, importance_high=1.75)
    assert (sequence["truncated"], sequence["masked"], sequence["rejected"]) == (0, 5, 0)


@pytest.mark.parametrize(
    ("mode", "mean"),
    [
        ("token-truncate", (1.75 + 1 + 1.75 + 0.25 + 1 + 1.5 + 0.75) / 7),
        ("token-mask", (1 + 1 + 1.5 + 0.75) / 4),
        ("sequence-truncate", (1.75 + 0.5 + math.sqrt(1.125)) / 3),
        ("product-truncate", (1.75 + 0.25 + 1.125) / 3),
    ],
)
@pytest.mark.parametrize("threshold", [None, 1.3])
def test_normalized_weights_by_hand(mode: str, mean: float, threshold: float | None) -> None:
    """Means over tokens, or one per response; after truncation, without masked ones, whatever is rejected then."""
    settings = dict(importance_sampling=mode, importance_low=0.5, importance_high=1.75, reject_sequence_above=threshold)
    weights, sums = compute(**settings)
    torch.testing.assert_close(normalize_weights(weights, sums), weights / mean)


def test_weights_that_are_all_masked_stay_zero() -> None:
    weights, sums = compute([100.0] * len(RATIOS), importance_sampling="token-mask")
    assert not normalize_weights(weights, sums).any() and not weights.any()


def test_metrics_by_hand() -> None:
    sums = {"tokens": 8.0, "sequences": 4.0, "truncated": 2.0, "masked": 1.0, "rejected": 3.0, "weight": 6.0}
    assert finish_importance_weights(sums) == {
        "mismatch/truncated_fraction": 0.25,
        "mismatch/masked_fraction": 0.125,
        "mismatch/rejected_fraction": 0.75,
        "mismatch/mean_weight": 0.75,
    }


@pytest.mark.parametrize("mode", ["token-truncate", "token-mask", "sequence-truncate", "product-mask"])
def test_equal_logprobs_have_weight_one(mode: str) -> None:
    weights, sums = compute([1.0] * len(RATIOS), importance_sampling=mode, reject_sequence_above=1e-6)
    assert torch.equal(weights, MASK.float()) and sums["weight"] == sums["tokens"] == 7.0


@pytest.mark.parametrize("mode", ["token-truncate", "sequence-truncate", "product-truncate"])
def test_a_weight_that_overflows_is_truncated(mode: str) -> None:
    """exp(100) is inf in float32."""
    logprobs, mask = torch.tensor([0.0, 0.0]), torch.tensor([False, True])
    one, config = Responses.of_sequences(torch.zeros(2).long()), AlgorithmConfig(importance_sampling=mode)
    weights, _ = compute_importance_weights(logprobs, torch.tensor([0.0, -100.0]), mask, one, config)
    assert weights.tolist() == [0.0, 2.0]


def test_masked_tokens_enter_nothing() -> None:
    """NaN or a large gap at a prompt position neither spreads nor rejects."""
    settings = dict(importance_sampling="sequence-truncate", reject_sequence_above=3.0)
    dirty = [ratio if kept else float("nan") for ratio, kept in zip(RATIOS, MASK.tolist(), strict=True)]
    (clean_weights, clean_sums), (weights, sums) = compute(**settings), compute(dirty, **settings)
    assert torch.equal(weights, clean_weights) and sums == clean_sums and clean_weights.sum() > 0


def test_a_rank_of_padding() -> None:
    nothing = torch.zeros(3)
    none, config = Responses.of_sequences(torch.full((3,), -1)), AlgorithmConfig(importance_sampling="sequence-mask")
    weights, sums = compute_importance_weights(nothing, nothing, nothing.bool(), none, config)
    sums = {name: float(value) for name, value in sums.items()}
    assert not weights.any() and set(sums.values()) == {0.0}
    assert set(finish_importance_weights(sums).values()) == {0.0}


def test_mismatch_metrics_by_hand() -> None:
    """Two ranks with gaps log 2 and 0: weights 2 and 1, of which (2 + 1)^2 / (2 (4 + 1)) = 0.9 samples."""
    old, mask = torch.tensor([LOG2, 5.0, 0.0], dtype=torch.float64), torch.tensor([True, False, True])
    parts = [sum_mismatch(old[part], torch.zeros(len(old[part])), mask[part]) for part in (slice(0, 2), slice(2, 3))]
    sums = {key: sum(part[0][key] for part in parts) for key in parts[0][0]}
    assert finish_mismatch(sums, max(part[1] for part in parts)) == pytest.approx(
        {
            "mismatch/max": LOG2,
            "mismatch/mean": LOG2 / 2,
            "mismatch/k3": (2 - 1 - LOG2) / 2,
            "mismatch/effective_sample_size": 0.9,
        }
    )
