# SPDX-License-Identifier: Apache-2.0
"""Validation metrics against numbers by hand, and pass@k against the estimator's formula."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from megatron_rl.rewards.answers import compute_validation_metrics, estimate_pass_at_k, name_answer


@pytest.mark.parametrize(
    "response, answer",
    [(r"so \boxed{42}", "42"), ("x\n#### 7 \n", "7"), ("  82\n", "82"), (r"\boxed{open", r"\boxed{open")],
)
def test_name_answer(response, answer):
    assert name_answer(response) == answer


def test_one_response_has_an_accuracy_only():
    assert compute_validation_metrics([[1.0], [0.0], [0.5]], [["a"], ["b"], ["c"]]) == {"accuracy": 0.5}


def test_several_responses_by_hand():
    rewards = [[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0]]
    answers = [["3", "5", "5", "4"], ["1", "1", "2", "3"], ["", "", "", ""], ["7", "8", "8", "7"]]
    assert compute_validation_metrics(rewards, answers) == {
        "accuracy": 5 / 16,
        "mean@4": 5 / 16,
        "pass@4": 0.75,
        "best@4": 0.75,
        "maj@4": 0.5,
    }  # 5 is right, 1 is not, "" is not, 7 comes before 8 and is right


def test_a_tie_goes_to_the_first_answer():
    assert compute_validation_metrics([[1.0, 0.0]], [["a", "b"]])["maj@2"] == 1.0
    assert compute_validation_metrics([[0.0, 1.0]], [["a", "b"]])["maj@2"] == 0.0


def test_the_majority_decides_not_the_place_of_an_answer():
    """It is in the middle, and once at the end; equal answers of different rewards count as the first of them."""
    answers = [["a", "b", "b", "c", "d"], ["a", "c", "d", "b", "b"], ["a", "b", "b", "b", "a"]]
    rewards = [[0.0, 1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 1.0], [0.0, 0.5, 0.25, 0.125, 0.0]]
    for answer, reward, expected in zip(answers, rewards, (1.0, 1.0, 0.5), strict=True):
        assert compute_validation_metrics([reward], [answer])["maj@5"] == expected
    assert compute_validation_metrics(rewards, answers)["maj@5"] == 2.5 / 3


def test_graded_rewards():
    """A mark for the form alone is not a pass; rewards of -1 and 1 work as well."""
    metrics = compute_validation_metrics([[0.1, 0.2], [-1.0, 1.0]], [["a", "a"], ["b", "c"]])
    assert (metrics["pass@2"], metrics["best@2"], metrics["mean@2"]) == (0.5, 0.6, pytest.approx(0.075))


def test_pass_at_k_is_the_unbiased_estimator():
    """The share of the subsets of k responses that hold a correct one, over random counts of correct responses."""
    rewards = (np.random.default_rng(0).random((50, 6)) < 0.2).astype(float)
    for k in range(1, 7):
        expected = np.mean([[max(chosen) for chosen in combinations(row, k)] for row in rewards])
        assert 0 < expected < 1
        assert estimate_pass_at_k(rewards, k) == pytest.approx(expected)
    assert compute_validation_metrics(rewards.tolist(), [["x"] * 6] * 50)["pass@6"] == estimate_pass_at_k(rewards, 6)
