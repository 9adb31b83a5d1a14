# SPDX-License-Identifier: Apache-2.0
"""Built-in reward rules; they never raise on a response, and unreadable answers are wrong.

`exact_match` compares texts, `score_math` meanings, `marks_answer` only the form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from megatron_rl.rewards.answers import extract_answer

AnswerPolicy = Literal["marked", "any"]

UNMARKED, TIMEOUTS, UNPARSABLE_TRUTH = "unmarked_answers", "math_timeouts", "math_unparsable_truth"
# Counts of failures in `score_math`; their names have no source prefix in a sum.
COUNTS = (UNMARKED, TIMEOUTS, UNPARSABLE_TRUTH)


def exact_match(response: str, ground_truth: Any) -> float:
    """Return 1.0 if the response equals any ground truth, ignoring surrounding whitespace, else 0.0."""
    return float(any(response.strip() == truth.strip() for truth in list_truths(ground_truth)))


def score_math(
    response: str, ground_truth: Any, data_source: str = "", answer: AnswerPolicy = "marked"
) -> dict[str, float]:
    """Score 1.0 if the response's answer equals a ground truth mathematically, else 0.0.

    Args:
        ground_truth: an answer, a solution that marks it, or a list of alternatives.
        answer: "marked" accepts only a marked answer; "any" falls back to the last expression.

    Returns:
        "score", and 1.0 or 0.0 per name in `COUNTS`: no answer marked; timeout; compared as text only.
    """
    from megatron_rl.rewards.mathematics import compare_answers

    found = extract_answer(response, data_source)
    counts = dict.fromkeys(COUNTS, 0.0) | {UNMARKED: float(found is None)}
    if found is None and answer == "marked":
        return {"score": 0.0, **counts}
    text = response.strip() if found is None else found
    verdicts = [
        compare_answers(text, extract_answer(truth) or truth.strip(), is_named=found is not None)
        for truth in list_truths(ground_truth)
    ]
    return {
        "score": float("equal" in verdicts),
        **counts,
        TIMEOUTS: float("timeout" in verdicts),
        UNPARSABLE_TRUTH: float("unparsable truth" in verdicts),
    }


def marks_answer(response: str, ground_truth: Any = "", data_source: str = "") -> float:
    r"""Return 1.0 if the response marks an answer, right or wrong, by a closed \boxed{} or a "####", else 0.0."""
    return float(bool(extract_answer(response, data_source)))


def _score_as_verl(response: str, ground_truth: Any, data_source: str) -> float | dict[str, float]:
    from megatron_rl.rewards.public_sets import find_scorer

    return find_scorer(data_source)(response, ground_truth)


# Name in a config -> rule(response, ground_truth, data_source, answer).
RULES: dict[str, Callable[[str, Any, str, AnswerPolicy], float | dict[str, float]]] = {
    "exact": lambda response, truth, source, answer: exact_match(response, truth),
    "math": score_math,
    "format": lambda response, truth, source, answer: marks_answer(response, truth, source),
    "by_data_source": lambda response, truth, source, answer: _score_as_verl(response, truth, source),
}


def list_truths(ground_truth: Any) -> list[Any]:
    """Return the alternative ground truths as a list."""
    return ground_truth if isinstance(ground_truth, list) else [ground_truth]
