# SPDX-License-Identifier: Apache-2.0
"""pyright in its basic mode finds no error in the package; its few exceptions have reasons.

Its subject is the package and the folders below tools/. Not covered: the commands in tools and launch, tests, and
unchecked assumptions (`Any`, `cast`, libraries without types).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_rl"
# Errors of a room that are still there; a number may only become smaller, and must when errors go.
STILL_THERE: dict[str, int] = {}
MOST_IGNORES = 30
_IGNORE = re.compile(r"#\s*(?:pyright|type):\s*ignore(?P<rest>.*)")


def list_sources() -> list[Path]:
    wings = [path for path in (PACKAGE.parent / "tools").glob("*/*.py") if path.parent.name != "benchmarks"]
    return sorted([*PACKAGE.rglob("*.py"), *wings])


def run_checker() -> dict[str, Any]:
    """Its report; it reads `[tool.pyright]` of pyproject.toml and the libraries of this interpreter."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=1200)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: there are errors
    return json.loads(done.stdout)


def test_the_checker_finds_no_error() -> None:
    report = run_checker()
    assert report["summary"]["filesAnalyzed"] == len(list_sources())
    errors, lines = Counter[str](), []
    for error in report["generalDiagnostics"]:
        if error["severity"] == "error":
            path, start = Path(error["file"]).relative_to(PACKAGE.parent), error["range"]["start"]
            errors[path.parts[1]] += 1
            lines.append(f"{path}:{start['line'] + 1}: {error['message']} ({error.get('rule', 'syntax')})")
    assert dict(errors) == STILL_THERE, "\n" + "\n".join(lines)


def test_what_is_ignored_is_little_and_has_a_rule_and_a_reason() -> None:
    count, problems = 0, []
    for path in list_sources():
        lines = path.read_text(encoding="utf-8").splitlines()
        for before, (number, line) in zip(["", *lines], enumerate(lines, start=1)):
            found = _IGNORE.search(line)
            count += found is not None
            if found and not re.fullmatch(r"\[\w+\](  # .+)?", found["rest"]):
                problems.append(f"{path}:{number}: ignores no named rule")
            elif found and "  # " not in found["rest"] and not before.lstrip().startswith("#"):
                problems.append(f"{path}:{number}: no reason behind it and none in the line above")
    assert not problems, "\n".join(problems)
    assert count <= MOST_IGNORES
