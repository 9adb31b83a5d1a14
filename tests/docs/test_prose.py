# SPDX-License-Identifier: Apache-2.0
"""American spelling, and none of some words that readers stumble over, in pages, sources and tests.

Not covered: whether a sentence reads well.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".md", ".py", ".sh", ".js", ".html", ".css", ".sbatch", ".svg", ".yaml"}
STUMBLES = {
    r"colour|honour|favour|neighbour|behaviour|centred": "American spelling: -or, centered",
    r"\w*(normal|general|initial|synchron|quant|optim)is(e|ed|es|ing|ation)\b": "American spelling: -ize",
    r"mend(s|ed)?\b": "fix",
    r"(goes|go|went) on\b(?! (a|the|top))": "continue",
    r"anew\b": "again",
    r"in vain\b": "say what happened",
    r"rubbish\b": "say what it is",
    r"heed(s|ed)?\b": "obey, read",
    r"whoever\b": "name who",
    r"(beforehand|thereof|hereby|thereby|wherein|whilst|amongst|shall|hinder(s|ed)?)\b": "a plainer word",
}
MADE = {"config.md", "errors.md", "verl_keys.md", "metrics.md", "gpu_status.md"}  # of texts of the code
# In pages only: code may name the owner of a number.
PAGES = {
    r"those of\b": "name them again, or use a possessive",
    r"of (yours|ours|theirs)\b": "your, our, their",
    r"(in|out)side of\b": "inside, outside",
    r"(nobody|everybody|somebody|anybody)\b": "no one, everyone; or the subject that is meant",
    r"in turns\b": "alternating",
    r"punish\w*": "penalize, penalty",
    r"behind the (prompt|stop text)\b": "after",
    r"(beside|besides) (generation|training)\b": "during",
    r"to be had\b": "available",
    r"as it were\b": "say it",
    r"so-called\b": "its name",
}
PATTERN, PAGE_PATTERN = (
    re.compile("|".join(rf"\b(?:{pattern})" for pattern in patterns), re.IGNORECASE) for patterns in (STUMBLES, PAGES)
)


def test_words_that_readers_stumble_over() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in SUFFIXES and path != Path(__file__).resolve() and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            patterns = [PATTERN, PAGE_PATTERN] if path.suffix == ".md" and path.name not in MADE else [PATTERN]
            found += [
                f"{name}:{n}: {m.group()}"
                for n, line in enumerate(lines, 1)
                for pattern in patterns
                if (m := pattern.search(line))
            ]
    assert not found, "\n".join([*found, *(f"{word}: {instead}" for word, instead in (STUMBLES | PAGES).items())])


@pytest.mark.parametrize("text", ["Colours", "neighbouring", "normalised", "it goes on", "whoever", "optimisation"])
def test_the_pattern_finds(text: str) -> None:
    assert PATTERN.search(text)


@pytest.mark.parametrize("text", ["those of", "a file of yours", "Outside of it", "beside training", "punishment"])
def test_the_pattern_of_pages_finds(text: str) -> None:
    assert PAGE_PATTERN.search(text) and not PATTERN.search(text)


@pytest.mark.parametrize("text", ["recommend", "it goes on top", "promise", "amendment", "optimistic", "normalized"])
def test_the_pattern_passes(text: str) -> None:
    assert not PATTERN.search(text)
