# SPDX-License-Identifier: Apache-2.0
"""Counts in docstrings and comments of every folder: headless clauses, things that speak, empty entries.

Limits are per 1,000 words, from the ranges of torchtitan, slime, prime-rl, OLMo-core and megatron-core. As a program,
it prints the counts of each folder, and thirty docstrings drawn by the seed of the first argument.

Not covered: whether a sentence is true or reads well.
"""

from __future__ import annotations

import ast
import io
import random
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARKS = re.compile(r"#\s*(SPDX|noqa|type:|pyright|fmt:|ruff|!)")
WORD = re.compile(r"[A-Za-z']+")
LIMITS = {
    r"\b[Ww]hat\b": 1.5,
    r"\b(tell|tells|told|hear|hears|heard|ask|asks|asked|know|knows|known|say|says|said)\b": 0.6,
    r"\b[Ww]here\b": 1.5,
    r"\bNone: ": 0.2,
}
DOCS_LIMIT = 2.0
ENTRY = re.compile(r"^ {4}(\w+): (.+)$", re.MULTILINE)
EMPTY = {"a", "an", "the", "of", "this", "its", "in", "for", "to", "run", "rank", "ranks", "job", "config"}
Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def list_sources() -> list[Path]:
    found = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("not a git checkout")
    return [path for name in found.stdout.splitlines() if (path := ROOT / name).exists()]


def find_docstrings(source: str) -> Iterator[tuple[Definition, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Definition) and (text := ast.get_docstring(node)):
            yield node, text


def find_comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not MARKS.match(token.string):
            yield token.string


def name_folder(path: Path) -> str:
    return "/".join(path.relative_to(ROOT).parts[:-1][:2])


def read_folders() -> dict[str, str]:
    texts: dict[str, list[str]] = defaultdict(list)
    for path in list_sources():
        source = path.read_text(encoding="utf-8")
        texts[name_folder(path)] += [text for _, text in find_docstrings(source)]
        texts[name_folder(path)] += find_comments(source)
    return {folder: "\n".join(parts) for folder, parts in texts.items()}


def count(pattern: str, text: str) -> tuple[int, float]:
    """Return the number of matches, and matches per 1,000 words."""
    matches = len(re.findall(pattern, text))
    return matches, 1000 * matches / max(len(WORD.findall(text)), 1)


def test_folders_stay_within_the_limits() -> None:
    """One match is allowed in a folder that is too small for its limit."""
    found = {
        (folder, pattern): round(rate, 2)
        for folder, text in read_folders().items()
        for pattern, limit in LIMITS.items()
        for matches, rate in [count(pattern, text)]
        if matches > 1 and rate > limit
    }
    assert not found


def test_pages_stay_within_the_limit() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    assert count(r"\b[Ww]hat\b", re.sub(r"```.*?```", "", text, flags=re.DOTALL))[1] <= DOCS_LIMIT


def find_empty_entries(node: Definition, text: str) -> Iterator[str]:
    """Yield the entries of a docstring whose words all stand in the name or in the annotation already."""
    arguments = node.args if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None
    annotations = {} if arguments is None else {
        argument.arg: ast.unparse(argument.annotation)
        for argument in (*arguments.args, *arguments.kwonlyargs)
        if argument.annotation is not None
    }  # fmt: skip
    for name, description in ENTRY.findall(text):
        described = {word.lower() for word in WORD.findall(description)}
        if described <= EMPTY | {
            word.lower() for word in WORD.findall(f"{name} {annotations.get(name, '')}".replace("_", " "))
        }:
            yield f"{name}: {description}"


def test_entries_say_more_than_their_names() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {entry}"
        for path in list_sources()
        for node, text in find_docstrings(path.read_text(encoding="utf-8"))
        for entry in find_empty_entries(node, text)
    ]
    assert not found, "\n".join(found)


def test_counts_find_what_they_should() -> None:
    """The counts themselves, on one function."""
    source = '''def f(batch_size: int, lengths: list[int]):
    """What it says, where None: nothing.

    Args:
        batch_size: the batch size.
        lengths: [batch] tokens of each prompt.
    """
    return 1  # told
'''
    node, text = next(find_docstrings(source))
    assert [*find_empty_entries(node, text)] == ["batch_size: the batch size."]
    assert [count(pattern, "\n".join([text, *find_comments(source)]))[0] for pattern in LIMITS] == [1, 2, 1, 1]


def name_definitions(node: ast.AST, prefix: str = "", within: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield every definition with its qualified name, arguments and return type, and the first line of its class."""
    for child in ast.iter_child_nodes(node):
        inner, around = prefix, within
        if isinstance(child, Definition) and not isinstance(child, ast.Module):
            signature = ""
            if not isinstance(child, ast.ClassDef):
                returned = f" -> {ast.unparse(child.returns)}" if child.returns else ""
                signature = f"({ast.unparse(child.args)}){returned}"
            yield f"{prefix}{child.name}{signature}{within}", child
            inner = f"{prefix}{child.name}."
            summary = (ast.get_docstring(child) or "").partition("\n")[0]
            around = f"\n(in {child.name}: {summary})" if isinstance(child, ast.ClassDef) else ""
        yield from name_definitions(child, inner, around)


def draw(seed: int, number: int) -> Iterator[str]:
    """Yield docstrings of the package, drawn by a seed, with file, name and signature; of a method, its class too."""
    found = []
    for path in list_sources():
        if path.is_relative_to(ROOT / "megatron_rl"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            named = [("module", tree), *name_definitions(tree)]
            found += [
                f"{path.relative_to(ROOT)}: {name}\n{text}" for name, node in named if (text := ast.get_docstring(node))
            ]
    yield from random.Random(seed).sample(found, number)


if __name__ == "__main__":
    for folder, text in sorted(read_folders().items()):
        print(folder, len(WORD.findall(text)), *(f"{count(pattern, text)[1]:.1f}" for pattern in LIMITS))
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    print(f"\nthirty docstrings of seed {seed}:", *draw(seed, 30), sep="\n\n")
