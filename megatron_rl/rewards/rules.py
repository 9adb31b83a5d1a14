# SPDX-License-Identifier: Apache-2.0
"""Rules that compare a response with the ground truth: 1.0 or 0.0, never an exception.

`exact_match` compares texts. `math_equal` compares what the texts mean: cheap comparisons first (equal
texts, equal integers), then math-verify, which parses LaTeX and expressions into sympy. A response is
whatever a policy happened to write, so a text that cannot be parsed, or not in time, is a wrong answer.
`marks_answer` looks at the form only. `RULES` are their names in a config.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_BOXED = "\\boxed{"
_TIMEOUT_SECONDS = 5


def exact_match(response: str, ground_truth: str) -> float:
    """1.0 if the texts are equal but for whitespace around them, else 0.0."""
    return float(response.strip() == ground_truth.strip())


def math_equal(response: str, ground_truth: str) -> float:
    r"""1.0 if the answer in `response` equals `ground_truth` mathematically, else 0.0.

    The answer is what the last \boxed{} or the last "#### " names; without either, the last expression
    that math-verify finds in the response.
    """
    if response.strip() == ground_truth.strip():
        return 1.0
    named, gold = extract_answer(response), extract_answer(ground_truth) or ground_truth.strip()
    answer = response.strip() if named is None else named
    if answer == gold:
        return 1.0
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold):
        return float(int(answer) == int(gold))
    if not answer or not gold:
        return 0.0
    return float(_verify(answer if named is None else _boxed(named), _boxed(gold)))


def marks_answer(response: str, ground_truth: str = "") -> float:
    r"""1.0 if the response names an answer, right or wrong, by a closed \boxed{} or a "####", else 0.0."""
    return float(bool(extract_answer(response)))


def extract_answer(text: str) -> str | None:
    r"""The answer that a text names: the content of its last \boxed{}, or what follows its last "####".

    Returns:
        The answer without whitespace around it; None if the text names none.
    """
    start = text.rfind(_BOXED)
    if start >= 0:
        content = _up_to_closing_brace(text[start + len(_BOXED):])
        if content is not None:
            return content.strip()
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    return lines[0].strip() if mark and lines else None


# Name in a config -> rule(response, ground_truth).
RULES: dict[str, Callable[[str, str], float]] = {"exact": exact_match, "math": math_equal, "format": marks_answer}


def _up_to_closing_brace(text: str) -> str | None:
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:position]
    return None


def _boxed(answer: str) -> str:
    """math-verify reads bare LaTeX such as x^2+1 only where an environment marks it as mathematics."""
    return answer if "$" in answer or "\\boxed" in answer else f"{_BOXED}{answer}}}"


def _verify(answer: str, gold: str) -> bool:
    import math_verify  # loads sympy, which most runs on toy tasks never need
    from math_verify.errors import TimeoutException

    # Its time limit is a SIGALRM, which only the main thread can have; other threads go without.
    in_main_thread = threading.current_thread() is threading.main_thread()
    limit = _TIMEOUT_SECONDS if in_main_thread else None
    try:
        target = math_verify.parse(answer, parsing_timeout=limit)
        return bool(math_verify.verify(math_verify.parse(gold, parsing_timeout=limit), target, timeout_seconds=limit))
    except (Exception, TimeoutException):  # a response must not be able to end the run
        return False
