# SPDX-License-Identifier: Apache-2.0
"""Metrics of validation with one or several responses per prompt; pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import mode

import numpy as np

from megatron_rl.rewards.answers import extract_answer


def name_answer(response: str) -> str:
    r"""The answer that a response votes for: what it marks by \boxed{} or ####, else all of it, stripped."""
    return extract_answer(response) or response.strip()


def compute_validation_metrics(
    rewards: Sequence[Sequence[float]], answers: Sequence[Sequence[str]], correct_from: float = 0.5
) -> dict[str, float]:
    """Means over prompts.

    Args:
        rewards: [num_prompts][k].
        answers: [num_prompts][k], from `name_answer`; read only for k > 1.
        correct_from: least reward of a response that counts as correct for pass@k.

    Returns:
        k = 1: "accuracy", the mean reward. k > 1, with k written as its number: "mean@k", the mean reward, also
        as "accuracy"; "pass@k", see `estimate_pass_at_k`; "best@k", the mean of the best reward; "maj@k", the mean
        reward of the answer that most responses name (the one that comes first, where several do).
    """
    table = np.asarray(rewards, np.float64)
    k = table.shape[1]
    accuracy = float(table.mean())
    if k == 1:
        return {"accuracy": accuracy}
    best = table.max(1)
    majority = [given[list(answer).index(mode(answer))] for given, answer in zip(rewards, answers, strict=True)]
    return {
        "accuracy": accuracy,
        f"mean@{k}": accuracy,
        f"pass@{k}": estimate_pass_at_k(table, k, correct_from),
        f"best@{k}": float(best.mean()),
        f"maj@{k}": float(np.mean(majority)),  # of equally frequent answers the first one counts
    }


def estimate_pass_at_k(rewards: np.ndarray, k: int, correct_from: float = 0.5) -> float:
    """Probability that one of k responses is correct: the unbiased estimator of arXiv 2107.03374, equation 1.

    Args:
        rewards: [num_prompts, n], n >= k.
        k: responses.
        correct_from: least reward of a response that counts as correct.
    """
    n = rewards.shape[1]
    wrong = n - (rewards >= correct_from).sum(1)
    return float(np.mean([1 - comb(int(count), k) / comb(n, k) for count in wrong]))
