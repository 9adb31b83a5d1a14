# SPDX-License-Identifier: Apache-2.0
"""Coverage of selected lines in a process and its children, by Python's tracing.

Children trace themselves: Python imports `sitecustomize` at startup.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_SITE = """
import json, os, sys, threading
WANTED = {file: frozenset(lines) for file, lines in json.loads(os.environ["TRACED_LINES"]).items()}
OUT = os.path.join(os.environ["TRACED_TO"], str(os.getpid()))
SEEN = set()

def enter(frame, event, argument):
    lines = WANTED.get(frame.f_code.co_filename)
    if lines is None or not lines & {line for _, _, line in frame.f_code.co_lines() if line}:
        return None
    return follow

def follow(frame, event, argument):
    place = frame.f_code.co_filename, frame.f_lineno
    if event == "line" and place not in SEEN and frame.f_lineno in WANTED[place[0]]:
        SEEN.add(place)
        with open(OUT + f"-{os.getpid()}", "a") as file:
            file.write(json.dumps(place) + "\\n")
    return follow

threading.settrace(enter)
sys.settrace(enter)
"""


def trace(command: Sequence[str], lines: Mapping[str, Sequence[int]], root: Path) -> tuple[int, set[tuple[str, int]]]:
    """Run a Python command and record the executed lines.

    Args:
        lines: lines of interest by file.
        root: working directory.

    Returns:
        Exit status; lines executed by the process or its children.
    """
    with tempfile.TemporaryDirectory() as directory:
        site, found = Path(directory) / "site", Path(directory) / "found"
        site.mkdir()
        found.mkdir()
        (site / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
        wanted = json.dumps({file: [*numbers] for file, numbers in lines.items()})
        path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
        environment = os.environ | {"PYTHONPATH": path, "TRACED_LINES": wanted, "TRACED_TO": str(found)}
        done = subprocess.run([sys.executable, *command], cwd=root, env=environment, check=False)
        hits = [json.loads(line) for file in found.iterdir() for line in file.read_text().splitlines()]
    return done.returncode, {(file, line) for file, line in hits}
