# SPDX-License-Identifier: Apache-2.0
"""Comparison of an answer with the ground truth by meaning.

Equal texts and numbers with units (`quantities.py`) come first. If the ground truth is a number, the answer must be a
number without an operation left to compute. Everything else goes to math-verify (`judge.py`).
"""

from __future__ import annotations

import re

from megatron_rl.rewards.judge import Verdict, judge
from megatron_rl.rewards.quantities import clean, read_last_quantity, read_quantity

_LONGEST = 2000  # characters of an answer for math-verify, which looks for the last expression
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_MATH_WORDS = frozenset({"sqrt", "frac", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "infty", "cbrt"})
_UNIT_BEHIND = re.compile(r"(?<=[\d})\]])\s+[A-Za-z]{2,}(?:\s+[A-Za-z]{2,})*\.?$")
# Numbers too large to compute: towers of powers, large exponents, large factorials.
_HUGE = re.compile(r"\d\s*(?:\^|\*\*)\s*[{(]*\s*(?:\d+\s*[})]*\s*(?:\^|\*\*)|\d{5,})|\d{5,}\s*\)?\s*!|!\s*\)?\s*!")


def compare_answers(answer: str, truth: str, *, is_named: bool = True) -> Verdict:
    """Compare an answer with the ground truth.

    Args:
        answer: the marked answer if `is_named`, else the whole response.
        truth: the ground truth, without a box.
    """
    if not answer:
        return "different"
    ours, theirs = clean(answer), clean(truth)
    if ours == theirs or (_is_words(theirs) and ours.casefold() == theirs.casefold()):
        return "equal"
    gold, found = read_quantity(truth), read_quantity(answer, is_answer=True)
    if gold and gold.is_finished:  # math-verify would compute operations left in the answer
        found = found or (None if is_named else read_last_quantity(answer))
        return "equal" if found and found.is_finished and gold.equals(found) else "different"
    if gold and found:
        return "equal" if gold.equals(found) else "different"
    if not gold and not is_readable(truth):
        return "unparsable truth"
    if is_named and (_is_words(ours) or _is_words(theirs)):
        return "different"  # as products of letters, "east" equals "seat"
    if _HUGE.search(answer):
        return "timeout"
    return judge(_as_latex(answer) if is_named else answer[-_LONGEST:], _as_latex(truth))


def is_readable(truth: str) -> bool:
    """Return whether a ground truth has content and balanced braces; else it is compared as text only."""
    depth = 0
    for character in re.sub(r"\\[{}]", "", truth):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0 and bool(re.search(r"\w|\\[a-z]+", truth))


def _is_words(text: str) -> bool:
    words = text.split()
    return any(len(word) > 3 for word in words) and all(
        word.isalpha() and word.casefold() not in _MATH_WORDS for word in words
    )


def _as_latex(answer: str) -> str:
    r"""Box an answer, because math-verify parses bare LaTeX such as x^2+1 only inside an environment.

    Sentences are left alone: in a box, words would be read as products.
    """
    answer = _UNIT_BEHIND.sub("", answer)
    words = [word for word in _WORD.findall(re.sub(r"\\[a-z]+\s*\{[^{}]*\}", "", answer)) if word not in _MATH_WORDS]
    is_marked = "$" in answer or "\\boxed" in answer
    return answer if is_marked or words else f"\\boxed{{{answer}}}"
