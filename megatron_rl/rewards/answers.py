# SPDX-License-Identifier: Apache-2.0
r"""The answer that a response marks.

Every text may mark one by \boxed{}, \fbox{} or "####"; responses to DAPO's and AIME's prompts, which ask for it, also
by a line "Answer: ...".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

RESTATES = "restates_prompt"  # component of a reward
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{}$\\]+))")
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|\\?[^\W\d_]+|[^\s\w]|_")
_OPERATORS = frozenset("+-*/^\u2212\u00d7\u00f7\u00b7") | {"\\times", "\\cdot", "\\div", "\\frac"}
_ASKS_FOR_ANSWER_LINE = ("math_dapo", "math_dapo_reasoning", "aime")


def extract_answer(text: str, data_source: str = "") -> str | None:
    r"""The answer that a text marks: the content of its last box, else what follows its last "####".

    Args:
        text: a response, or a solution of a data set.
        data_source: its name; responses to some data sets may mark the answer in a way of their own as well.

    Returns:
        The answer without whitespace around it; None if the text marks none.
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
    """What stands before the brace that closes an open one; None where none does."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:position]
    return None


def restates_prompt(response: str, prompt: str, truths: Sequence[str], data_source: str = "") -> bool:
    """Whether a response's answer is a part of its prompt, which holds none of the ground truths.

    An answer is what the response marks, of at least two words or numbers. Without a mark it is the last operation of
    the response ("9 + 10 + 22"), if the ground truths are numbers.

    Args:
        response, prompt: texts; case and whitespace do not count.
        truths: see `extract_answer`; without one, nothing is known about the prompt.
        data_source: see `extract_answer`.
    """
    marked = extract_answer(response, data_source)
    answer = _TOKEN.findall((response if marked is None else marked).casefold())
    if marked is None:
        answer = _last_operation(answer) if all(any(map(str.isdigit, truth)) for truth in truths) else []
    while answer and not answer[-1].isalnum() and not answer[-1][0].isdigit():
        answer.pop()
    prompt = prompt.casefold()
    if sum(token[-1].isalnum() for token in answer) < 2 or not all(token in prompt for token in {*answer}):
        return False
    given = _as_line(_TOKEN.findall(prompt))
    known = [_as_line(_TOKEN.findall((extract_answer(truth) or truth).casefold())) for truth in truths]
    return _as_line(answer) in given and bool(known) and not any(truth in given for truth in known)


def _last_operation(tokens: Sequence[str]) -> list[str]:
    """The tokens around the last number up to the next words; none if there is no operator among them."""
    numbers = [place for place, token in enumerate(tokens) if token[0].isdigit()]
    if not numbers:
        return []
    before = [*takewhile(lambda token: not token.isalpha(), reversed(tokens[: numbers[-1] + 1]))][::-1]
    return before if _OPERATORS & set(before) else []


def _as_line(tokens: Sequence[str]) -> str:
    """Tokens such that one line contains another only at their boundaries."""
    return f" {' '.join(tokens)} " if tokens else " "
