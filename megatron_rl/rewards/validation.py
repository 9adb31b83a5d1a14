# SPDX-License-Identifier: Apache-2.0
"""Validation metrics for one or several responses per prompt; pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import mode

import numpy as np

from megatron_rl.rewards.answers import extract_answer


def name_answer(response: str) -> str:
    r"""Return the response's vote for maj@k: its marked answer, else the whole text, stripped."""
    return extract_answer(response) or response.strip()


def compute_validation_metrics(
    rewards: Sequence[Sequence[float]], answers: Sequence[Sequence[str]], correct_from: float = 0.5
) -> dict[str, float]:
    """Compute means over prompts.

    Args:
        rewards: [num_prompts][k].
        answers: [num_prompts][k], from `name_answer`; read only for k > 1.
        correct_from: minimum reward of a correct response.

    Returns:
        "accuracy", the mean reward. For k > 1 also "mean@k", the same; "pass@k" (`estimate_pass_at_k`); "best@k", the
        mean best reward; "maj@k", the mean reward of the most frequent answer (the first on a tie).
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
        f"maj@{k}": float(np.mean(majority)),
    }


def estimate_pass_at_k(rewards: np.ndarray, k: int, correct_from: float = 0.5) -> float:
    """Estimate the probability that one of k responses is correct (arXiv 2107.03374, equation 1; unbiased).

    Args:
        rewards: [num_prompts, n], n >= k; at least `correct_from` is correct.
    """
    n = rewards.shape[1]
    wrong = n - (rewards >= correct_from).sum(1)
    return float(np.mean([1 - comb(int(count), k) / comb(n, k) for count in wrong]))
