# SPDX-License-Identifier: Apache-2.0
"""Wrong programs, each one snippet away from the right one, and the tests that must notice.

The rows of mutants.toml are the table. A mutant that survives is a hole in the tests, unless it is equivalent; then it
does not belong into the table. Not covered: processes that a test starts with an interpreter of their own (torchrun,
the scripts of launch/), which see the right program.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MUTANTS: list[dict[str, Any]] = tomllib.loads((HERE / "mutants.toml").read_text())["mutant"]
Run = Callable[..., dict[str, Any]]


@cache
def _list_tests(file: str) -> set[str]:
    """Node ids of the test functions of a file, without parameters."""
    tree = ast.parse((ROOT / file).read_text())
    classes = [(f"{node.name}::", node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
    return {
        f"{file}::{prefix}{node.name}"
        for prefix, body in [("", tree.body), *classes]
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_row_fits_the_sources() -> None:
    """Each snippet stands once in its file, the change compiles and is one, and its tests exist."""
    wrong = []
    for mutant in MUTANTS:
        source = (ROOT / mutant["file"]).read_text()
        name = f"{mutant['file']}: {mutant['meaning']}"
        if (count := source.count(mutant["old"])) != 1:
            wrong.append(f"{name}: the old snippet stands there {count} times")
            continue
        changed = ast.parse(source.replace(mutant["old"], mutant["new"]))
        if ast.dump(changed) == ast.dump(ast.parse(source)):
            wrong.append(f"{name}: the new snippet means the same")
        tests = [test.partition("[")[0] for test in mutant["tests"]]
        wrong += [f"{name}: there is no {test}" for test in tests if test not in _list_tests(test.partition("::")[0])]
        if not tests:
            wrong.append(f"{name}: no test is named")
    wrong += [f"{row} twice" for row, n in Counter((m["file"], m["old"], m["new"]) for m in MUTANTS).items() if n > 1]
    assert not wrong, "\n".join(wrong)
    assert len(MUTANTS) >= 90


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs tests in a fork of a warm process, with a file changed."""
    command = [sys.executable, str(HERE / "warm_parent.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None

        def ask(tests: list[str], file: str = "", old: str = "", new: str = "", **_: Any) -> dict[str, Any]:
            request = {"file": file, "old": old, "new": new, "tests": tests}
            print(json.dumps(request), file=parent.stdin, flush=True)
            return json.loads(parent.stdout.readline())

        yield ask
        parent.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted({test.partition("::")[0] for mutant in MUTANTS for test in mutant["tests"]}))
def test_the_right_program_passes(file: str, run: Run) -> None:
    """Otherwise a failure would prove nothing about a mutant."""
    tests = sorted({test for mutant in MUTANTS for test in mutant["tests"] if test.startswith(f"{file}::")})
    found = run(tests)
    assert found["status"] == 0, found["output"]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{Path(m['file']).stem}: {m['meaning']}" for m in MUTANTS])
def test_a_mutant_is_killed(mutant: dict[str, Any], run: Run) -> None:
    """Status 1 of pytest: a test failed. An error in collecting tests would kill any mutant and is none."""
    found = run(**mutant)
    assert found["status"] == 1, f"status {found['status']} of {mutant['tests']}\n{found['output']}"
