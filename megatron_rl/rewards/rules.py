# SPDX-License-Identifier: Apache-2.0
"""Rules that compare a response with the ground truth; no response makes them raise.

`exact_match` compares texts, `score_math` what the answers mean, `marks_answer` looks at the form only. A response
is whatever a policy happened to write, so a text that cannot be read is a wrong answer. `RULES` are their names in a
config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from megatron_rl.rewards.answers import extract_answer
from megatron_rl.rewards.mathematics import compare_answers

AnswerPolicy = Literal["marked", "any"]

UNMARKED, TIMEOUTS, UNPARSABLE_TRUTH = "unmarked_answers", "math_timeouts", "math_unparsable_truth"
# Components of `score_math` that count what went otherwise than asked; their names are the same in every sum.
COUNTS = (UNMARKED, TIMEOUTS, UNPARSABLE_TRUTH)


def exact_match(response: str, ground_truth: Any) -> float:
    """1.0 if the texts are equal but for whitespace around them, else 0.0; of several ground truths, to any."""
    return float(any(response.strip() == truth.strip() for truth in list_truths(ground_truth)))


def score_math(
    response: str, ground_truth: Any, data_source: str = "", answer: AnswerPolicy = "marked"
) -> dict[str, float]:
    """Score 1.0 if the response's answer equals the ground truth mathematically, else 0.0.

    Args:
        response: of the policy.
        ground_truth: an answer, or a solution that marks it; a list: any of them is right.
        data_source: see `extract_answer`.
        answer: "marked": only an answer that the response marks counts; "any": without a mark, the last expression
            of the response.

    Returns:
        "score", and 1.0 or 0.0 for each of `COUNTS`: the response marks no answer; reading the answer took too long;
        the ground truth could only be compared as text.
    """
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
    r"""1.0 if the response marks an answer, right or wrong, by a closed \boxed{} or a "####", else 0.0."""
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
    """The ground truths of which any is right."""
    return ground_truth if isinstance(ground_truth, list) else [ground_truth]
