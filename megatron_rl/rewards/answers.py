# SPDX-License-Identifier: Apache-2.0
r"""Extracts the answers marked in responses, detects copies from the prompt, and computes validation metrics.

An answer is marked by \boxed{}, \fbox{} or "####", and for DAPO and AIME, whose prompts request it, also by a line
"Answer: ...".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from math import comb
from statistics import mode

import numpy as np

RESTATES = "restates_prompt"  # component of a reward
CORRECT_FROM = 0.5  # minimum reward of a correct response
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{}$\\]+))")
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|\\?[^\W\d_]+|[^\s\w]|_")
_OPERATORS = frozenset("+-*/^\u2212\u00d7\u00f7\u00b7") | {"\\times", "\\cdot", "\\div", "\\frac"}
_ASKS_FOR_ANSWER_LINE = ("math_dapo", "math_dapo_reasoning", "aime")


def extract_answer(text: str, data_source: str = "") -> str | None:
    r"""Return the answer that a text marks, stripped, or `None`.

    It is the content of the last box, else the line after the last "####".

    Args:
        text: a response, or a solution of a data set.
        data_source: enables "Answer:" lines for DAPO and AIME.
    """
    for match in reversed(list(_BOX.finditer(text))):
        content = match["bare"] or read_to_closing_brace(text[match.end() :])
        if content is not None:
            return content.strip()
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    if mark and lines:
        return lines[0].strip()
    if data_source.startswith(_ASKS_FOR_ANSWER_LINE):
        return next((line.strip() for line in reversed(_ANSWER_LINE.findall(text))), None)
    return None


def read_to_closing_brace(text: str) -> str | None:
    """Return the text before the brace that closes an already open one, or `None`."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:position]
    return None


def restates_prompt(response: str, prompt: str, truths: Sequence[str], data_source: str = "") -> bool:
    """Return whether a response's answer is copied from a prompt that contains none of the ground truths.

    A marked answer needs at least two words or numbers. Without a mark, the answer is the last operation ("9 + 10 +
    22"), if the ground truths are numbers.

    Args:
        response, prompt: compared without case and whitespace.
        truths: the result is False if empty.
    """
    marked = extract_answer(response, data_source)
    answer = _TOKEN.findall((response if marked is None else marked).casefold())
    if marked is None:
        numbers = [place for place, token in enumerate(answer) if token[0].isdigit()]
        before = reversed(answer[: numbers[-1] + 1] if numbers else [])
        answer = [*takewhile(lambda token: not token.isalpha(), before)][::-1]
        if not (_OPERATORS & {*answer} and all(any(map(str.isdigit, truth)) for truth in truths)):
            return False
    while answer and not answer[-1].isalnum() and not answer[-1][0].isdigit():
        answer.pop()
    prompt = prompt.casefold()
    if sum(token[-1].isalnum() for token in answer) < 2 or not all(token in prompt for token in {*answer}):
        return False
    given = _as_line(_TOKEN.findall(prompt))
    known = [_as_line(_TOKEN.findall((extract_answer(truth) or truth).casefold())) for truth in truths]
    return _as_line(answer) in given and bool(known) and not any(truth in given for truth in known)


def _as_line(tokens: Sequence[str]) -> str:
    """Join tokens so that substring search matches only at token boundaries."""
    return f" {' '.join(tokens)} " if tokens else " "


def name_answer(response: str) -> str:
    r"""Return the response's vote for maj@k: its marked answer, else the whole text, stripped."""
    return extract_answer(response) or response.strip()


def compute_validation_metrics(
    rewards: Sequence[Sequence[float]], answers: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Compute means over prompts.

    Args:
        rewards: [num_prompts][k].
        answers: [num_prompts][k], from `name_answer`; read only for k > 1.

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
        f"pass@{k}": estimate_pass_at_k(table, k),
        f"best@{k}": float(best.mean()),
        f"maj@{k}": float(np.mean(majority)),
    }


def estimate_pass_at_k(rewards: np.ndarray, k: int) -> float:
    """Estimate the probability that one of k responses is correct (arXiv 2107.03374, equation 1; unbiased).

    Args:
        rewards: [num_prompts, n], n >= k; at least 0.5 is correct.
    """
    n = rewards.shape[1]
    wrong = n - (rewards >= CORRECT_FROM).sum(1)
    return float(np.mean([1 - comb(int(count), k) / comb(n, k) for count in wrong]))
