# SPDX-License-Identifier: Apache-2.0
"""Mistakes of users, and the words of the four parts of the one message that answers each (`mistakes.json`)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

_MESSAGE = re.compile(r"(.+?)\n  source:   (.+?)\n  expected: (.+?)\n  hint:     (.+)", re.DOTALL)
PARTS = ("found", "source", "expected", "hint")


@dataclass(frozen=True)
class Mistake:
    """A row of the table; a part's words are separated by " .. ", and {files} is the directory of the inputs.

    Attributes:
        kind: "train" and "finetune" (settings of the command line), "recipe" (its text, and settings), "program" or
            "reward" (Python), or "command" ("train" or a file of tools/, and arguments).
    """

    name: str
    kind: str
    given: list[str]
    found: str
    source: str
    expected: str
    hint: str

    def assert_answered_by(self, text: str, files: Path) -> None:
        """Check that a text is one message whose parts have the words, and no traceback."""
        parts = _MESSAGE.fullmatch(text.strip())
        assert parts is not None, text
        for name, part in zip(PARTS, parts.groups(), strict=True):
            for words in getattr(self, name).replace("{files}", str(files)).split(" .. "):
                assert words and words in part, f"{words!r} is not in {name} of: {text}"
        assert not re.match(r"\d+ mistakes\n", text) and "Traceback" not in text and len(text.splitlines()) < 10, text


def read_mistakes() -> list[Mistake]:
    """Read the table."""
    return [Mistake(*row) for row in json.loads(Path(__file__).with_suffix(".json").read_text())]
