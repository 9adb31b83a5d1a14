# SPDX-License-Identifier: Apache-2.0
r"""The answer that a response marks.

Every text may mark one by \boxed{}, \fbox{} or "####"; responses to DAPO's and AIME's prompts, which ask for it, also
by a line "Answer: ...".
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{}$\\]+))")
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
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
