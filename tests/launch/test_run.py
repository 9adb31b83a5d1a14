# SPDX-License-Identifier: Apache-2.0
"""tests/run.sh: its exit code, and that both processes are heard; set-up and pytest are stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# As `python -m pytest ...`: exits with the code that the test gave to the process in front or behind.
PYTHON = """#!/usr/bin/env bash
finish() { [[ "$LOST" == "$1" ]] || touch "$CLAIMS/finished-$1"; }
CLAIMS="${@: -1}"
[[ "$CLAIMS" == --backwards ]] && CLAIMS="${@: -2:1}"
case "$*" in
  *--backwards*) echo "said behind"; finish behind; exit $BEHIND ;;
  *--claims*) echo "said in front"; finish in-front; exit $FRONT ;;
  *) echo "arguments: $*"; exit $FRONT ;;
esac
"""


def run(
    directory: Path, *arguments: str, front: int = 0, behind: int = 0, lost: str = ""
) -> subprocess.CompletedProcess[str]:
    """tests/run.sh in a project that has nothing but it."""
    for name, text in (("tests/run.sh", ""), ("launch/setup.sh", ""), ("venv/bin/python", PYTHON)):
        path = directory / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    shutil.copy(Path(__file__).parents[1] / "run.sh", directory / "tests/run.sh")
    (directory / "venv/bin/python").chmod(0o755)
    (directory / "scratch").mkdir()
    environment = os.environ | {
        "MEGATRON_RL_VENV": str(directory / "venv"),
        "TMPDIR": str(directory / "scratch"),
        "FRONT": str(front),
        "BEHIND": str(behind),
        "LOST": lost,
    }
    return subprocess.run(
        ["bash", str(directory / "tests/run.sh"), *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("front, behind, code", [(0, 0, 0), (1, 0, 1), (0, 1, 1), (0, 134, 134), (2, 1, 1)])
def test_any_failure_of_the_two_processes_is_the_exit_code(tmp_path: Path, front: int, behind: int, code: int) -> None:
    result = run(tmp_path, front=front, behind=behind)
    assert result.returncode == code, result.stderr
    assert result.stdout == "said in front\nsaid behind\n"
    assert not list((tmp_path / "scratch").iterdir())  # nothing of the exchange is left


@pytest.mark.parametrize("lost", ["in-front", "behind"])
def test_a_process_that_a_test_ends_is_a_failure(tmp_path: Path, lost: str) -> None:
    result = run(tmp_path, lost=lost)
    assert result.returncode == 1
    assert result.stderr == f"tests/run.sh: the process {lost} ended before its last test\n"


def test_arguments_go_to_one_process(tmp_path: Path) -> None:
    result = run(tmp_path, "-k", "reshard", front=5)
    assert result.returncode == 5
    assert result.stdout == "arguments: -m pytest --durations=15 -k reshard\n"
