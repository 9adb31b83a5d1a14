# SPDX-License-Identifier: Apache-2.0
"""Whether an answer means the same as the ground truth.

Cheap and certain comparisons come first: equal texts, then two numbers with their units and separators
(`quantities.py`). If the ground truth is a number, the answer must be one, without an operation that is left to be
carried out. Formulas, sets, intervals and the like go to math-verify (`judge.py`).
"""

from __future__ import annotations

import re

from megatron_rl.rewards.judge import Verdict, judge
from megatron_rl.rewards.quantities import clean, read_last_quantity, read_quantity

_LONGEST = 2000  # characters of an answer; math-verify looks for the last expression
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_MATH_WORDS = frozenset({"sqrt", "frac", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "infty", "cbrt"})
_UNIT_BEHIND = re.compile(r"(?<=[\d})\]])\s+[A-Za-z]{2,}(?:\s+[A-Za-z]{2,})*\.?$")
# Numbers that would take for ever to write out: towers of powers, large exponents, large factorials.
_HUGE = re.compile(r"\d\s*(?:\^|\*\*)\s*[{(]*\s*(?:\d+\s*[})]*\s*(?:\^|\*\*)|\d{5,})|\d{5,}\s*\)?\s*!|!\s*\)?\s*!")


def compare_answers(answer: str, truth: str, *, is_named: bool = True) -> Verdict:
    """Compare an answer with the ground truth.

    Args:
        answer: what a response names as its answer, or the response itself.
        truth: the ground truth, without a box.
        is_named: `answer` is an answer and nothing else.
    """
    if not answer:
        return "different"
    ours, theirs = clean(answer), clean(truth)
    if ours == theirs or (_is_words(theirs) and ours.casefold() == theirs.casefold()):
        return "equal"
    gold, found = read_quantity(truth), read_quantity(answer, is_answer=True)
    if gold and gold.is_finished:  # math-verify would carry out the operations that an answer leaves
        found = found or (None if is_named else read_last_quantity(answer))
        return "equal" if found and found.is_finished and gold.equals(found) else "different"
    if gold and found:
        return "equal" if gold.equals(found) else "different"
    if not gold and not is_readable(truth):
        return "unparsable truth"
    if is_named and (_is_words(ours) or _is_words(theirs)):
        return "different"  # as formulas, "east" and "seat" would be the same product
    if _HUGE.search(answer):
        return "timeout"
    return judge(_as_latex(answer) if is_named else answer[-_LONGEST:], _as_latex(truth))


def is_readable(truth: str) -> bool:
    """Whether a ground truth can be compared by its meaning, as far as that shows without a parser.

    A ground truth without content or with braces that do not match is compared as text only.
    """
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
    r"""math-verify reads bare LaTeX such as x^2+1 only where an environment marks it as mathematics.

    In a sentence it looks for the expression itself; in a box, it would read the words as products.
    """
    answer = _UNIT_BEHIND.sub("", answer)
    words = [word for word in _WORD.findall(re.sub(r"\\[a-z]+\s*\{[^{}]*\}", "", answer)) if word not in _MATH_WORDS]
    is_marked = "$" in answer or "\\boxed" in answer
    return answer if is_marked or words else f"\\boxed{{{answer}}}"
