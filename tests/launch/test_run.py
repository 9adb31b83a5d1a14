# SPDX-License-Identifier: Apache-2.0
"""tests/run.sh: its tiers, its exit code, and the output of all its processes; set-up and pytest are stand-ins.

pytest itself runs on small projects to show how processes share tests and how a part of the slow ones is chosen. Not
covered: whether a part ends within its time on a given machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# As `python -m pytest ...`: exits with the code that the test gave to the process of that name.
PYTHON = """#!/usr/bin/env bash
sign=""
for word in "$@"; do [[ "$word" == */finished-* ]] && sign="$word"; done
[[ -n "$sign" ]] || { echo "arguments: $*"; exit $FRONT; }
name="${sign##*/finished-}"
[[ "$*" == *"-m slow"* ]] && name="slow-$name"
echo "said $name $(sed -E 's/.*(--part [0-9/]+ --deadline) ([0-9]+).*/\\1 \\2/; t; s/.*//' <<<"$*")"
[[ "$LOST" == "$name" ]] || touch "$sign"
case "$name" in
  in-front) exit $FRONT ;;
  behind) exit $BEHIND ;;
  slow-behind) exit $SLOW ;;
esac
"""


def run(
    directory: Path,
    *arguments: str,
    front: int = 0,
    behind: int = 0,
    slow: int = 0,
    lost: str = "",
    python_312: str = "bin/python3.12",
) -> subprocess.CompletedProcess[str]:
    """tests/run.sh in a project that has nothing but it; `python_312` is the place of an empty Python 3.12, if any."""
    set_up = 'echo "$MEGATRON_RL_PYTHON for $MEGATRON_RL_VENV" >>"${MEGATRON_RL_VENV%/venv*}/set-up"'
    environments = {"venv/bin/python": PYTHON, "venv-3.12/bin/python": PYTHON, python_312 or "none": "#!/bin/sh\n"}
    for name, text in {
        "tests/run.sh": "",
        "launch/setup.sh": set_up,
        "bin/python3.12": "exit 1",
        **environments,
    }.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    shutil.copy(TESTS / "run.sh", directory / "tests/run.sh")
    (directory / "scratch").mkdir(exist_ok=True)
    environment = os.environ | {
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "PYENV_ROOT": str(directory / "pyenv"),
        "MEGATRON_RL_VENV": str(directory / "venv"),
        "TMPDIR": str(directory / "scratch"),
        "FRONT": str(front),
        "BEHIND": str(behind),
        "SLOW": str(slow),
        "LOST": lost,
        "GIT_CEILING_DIRECTORIES": str(directory.parent),
    }
    return subprocess.run(
        ["bash", str(directory / "tests/run.sh"), *arguments], env=environment, capture_output=True, text=True
    )


def read_names(result: subprocess.CompletedProcess[str]) -> list[str]:
    """The processes in the order of their output; those behind come in any order."""
    names = [line.split()[1] for line in result.stdout.splitlines()]
    return [*names[:1], *sorted(names[1:3]), *names[3:]]


@pytest.mark.parametrize("front, behind, code", [(0, 0, 0), (1, 0, 1), (0, 1, 1), (0, 134, 134), (2, 1, 1)])
def test_any_failure_of_the_processes_is_the_exit_code(tmp_path: Path, front: int, behind: int, code: int) -> None:
    result = run(tmp_path, front=front, behind=behind)
    assert result.returncode == code, result.stderr
    assert read_names(result) == ["in-front", "behind", "checks"]
    assert not list((tmp_path / "scratch").iterdir())  # nothing of the exchange is left


@pytest.mark.parametrize("lost", ["in-front", "behind", "checks"])
def test_a_process_that_a_test_ends_is_a_failure(tmp_path: Path, lost: str) -> None:
    result = run(tmp_path, lost=lost)
    assert result.returncode == 1
    assert result.stderr == f"tests/run.sh: the process {lost} ended before its last test\n"


def test_arguments_go_to_one_process(tmp_path: Path) -> None:
    result = run(tmp_path, "-k", "reshard", front=5)
    assert result.returncode == 5
    assert result.stdout == "arguments: -m pytest --durations=15 -k reshard\n"


def test_all_is_the_fast_tests_and_then_the_slow_ones(tmp_path: Path) -> None:
    result = run(tmp_path, "--all", slow=7)
    assert result.returncode == 7
    assert read_names(result) == ["in-front", "behind", "checks", "slow-in-front", "slow-behind"]
    assert "--part" not in result.stdout


def test_continuous_integration_has_a_part_that_changes_with_every_commit(tmp_path: Path) -> None:
    """Without a history the day chooses. A failure of a fast test leaves the slow ones their turn."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    parts = []
    for commits in range(5):
        result = run(tmp_path, "--ci", front=commits, python_312="")
        assert result.returncode == commits
        assert read_names(result) == ["in-front", "behind", "checks", "slow-in-front", "slow-behind"]
        found = re.findall(r"said slow\S+ --part (\d)/4 --deadline (\d+)", result.stdout)
        assert len(found) == 2 and len(set(found)) == 1  # both processes have the same
        assert 600 < int(found[0][1]) - time.time() <= 720
        parts.append(int(found[0][0]))
        if commits == 0:
            subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "more"], check=True)
    assert parts[0] in {int(seconds) // 86400 % 5 or 4 for seconds in (time.time(), time.time() - 60)}
    assert parts[1:] == [1, 2, 3, 4]


@pytest.mark.parametrize("place", ["bin/python3.12", "pyenv/versions/3.12.1/bin/python3.12", ""])
def test_the_fifth_part_is_python_312(tmp_path: Path, place: str) -> None:
    """In an environment of its own, whose failures count. A command of pyenv for a Python that is not active fails."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    run(tmp_path)
    subprocess.run([*git, "init", "-q"], check=True)
    for _ in range(5):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "more"], check=True)
    (tmp_path / "set-up").unlink()
    result = run(tmp_path, "--ci", behind=3, slow=4, python_312=place)
    made = (tmp_path / "set-up").read_text().splitlines()
    if place:
        assert read_names(result) == ["in-front", "behind", "checks", "in-front", "behind"] and result.returncode == 3
        name = "python3.12" if place.startswith("bin") else tmp_path / place
        assert made[1:] == [f"{name} for {tmp_path}/venv-3.12"]
    else:
        assert read_names(result)[3:] == ["slow-in-front", "slow-behind"] and len(made) == 1
        assert "no Python 3.12 was found" in result.stderr and " --part 4/4 " in result.stdout


def write_project(directory: Path, files: dict[str, str], seconds: dict[str, float] | None = None) -> None:
    """A project with this one's conftest.py, whose tests append their names to `ran`."""
    directory.mkdir()
    shutil.copy(TESTS / "conftest.py", directory / "conftest.py")
    (directory / "slow_seconds.json").write_text(json.dumps(seconds or {}))
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n")
    head = (
        "import pytest\nfrom pathlib import Path\n"
        "def note(name):\n    with (Path(__file__).parent / 'ran').open('a') as file:\n"
        "        file.write(f'{name}\\n')\n"
        "@pytest.fixture(scope='module')\ndef made():\n    note('made')\n    yield\n    note('gone')\n"
        "@pytest.fixture(autouse=True)\ndef noted(request):\n    note(request.node.name)\n"
    )
    for name, text in files.items():
        (directory / name).write_text(head + text)


def begin(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start pytest on the project."""
    command = [sys.executable, "-m", "pytest", ".", "-p", "no:cacheprovider", *arguments]
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_processes_share_the_tests_of_a_file_but_not_what_shares_a_fixture(tmp_path: Path) -> None:
    files = {
        "test_a.py": "import time\n@pytest.mark.parametrize('n', range(8))\ndef test_a(n):\n    time.sleep(0.5)\n",
        "test_b.py": "@pytest.mark.parametrize('n', range(3))\ndef test_b(n, made):\n    pass\n",
    }
    write_project(tmp_path / "project", files)
    claims = tmp_path / "claims"
    claims.mkdir()
    signs = {name: claims / f"finished-{name}" for name in ("in-front", "behind")}
    processes = [
        begin(tmp_path / "project", "--claims", str(claims), "--sign", str(sign), *["--backwards"][: name == "behind"])
        for name, sign in signs.items()
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    ran = (tmp_path / "project/ran").read_text().split()
    names = [f"test_a[{n}]" for n in range(8)] + [f"test_b[{n}]" for n in range(3)]
    assert sorted(ran) == sorted([*names, "made", "gone"])
    passed = [int(re.findall(r"(\d+) passed", output)[0]) for output in outputs]
    assert sum(passed) == 11 and min(passed) >= 3  # the long file was shared
    assert all(sign.exists() for sign in signs.values())


SLOW_TEST = "pytestmark = pytest.mark.slow\n@pytest.mark.parametrize('n', range({n}))\ndef test_{name}(n):\n    pass\n"
SLOW_FILES = {f"test_{name}.py": SLOW_TEST.format(name=name, n=n) for name, n in dict(a=2, b=1, c=1, d=1, e=1).items()}


def test_parts_take_equally_long_and_are_everything_with_a_record(tmp_path: Path) -> None:
    """A record is of one parametrisation: a has 2 x 15 s."""
    seconds = {f"test_{name}.py::test_{name}": 60.0 if name == "d" else 15.0 for name in "abcd"}
    write_project(tmp_path / "project", SLOW_FILES, seconds)
    outputs = []
    for part in (1, 2):
        process = begin(tmp_path / "project", "-m", "slow", "--part", f"{part}/2")
        outputs.append(process.communicate()[0])
        assert process.returncode == 0, outputs
    listed = [re.findall(r"^  (test_\w).py \((\d)\)$", output, re.MULTILINE) for output in outputs]
    assert listed == [[("test_d", "1")], [("test_a", "2"), ("test_b", "1"), ("test_c", "1")]]
    assert all("not run, no seconds in slow_seconds.json: test_e.py::test_e[0]\n" in output for output in outputs)
    ran = (tmp_path / "project/ran").read_text().split()
    assert sorted(ran) == ["test_a[0]", "test_a[1]", "test_b[0]", "test_c[0]", "test_d[0]"]


def test_a_slow_test_that_would_end_too_late_is_named_and_not_begun(tmp_path: Path) -> None:
    seconds = {f"test_{name}.py::test_{name}": 500.0 if name == "a" else 5.0 for name in "abcd"}
    write_project(tmp_path / "project", SLOW_FILES, seconds)
    deadline = str(time.time() + 250)
    process = begin(tmp_path / "project", "-m", "slow", "--part", "1/1", "--deadline", deadline)
    output, _ = process.communicate()
    assert process.returncode == 0
    named = re.findall(r"^not run, out of time: (.*)$", output, re.MULTILINE)
    assert named == ["test_a.py::test_a[0]", "test_a.py::test_a[1]"]
    assert (tmp_path / "project/ran").read_text().split() == ["test_b[0]", "test_c[0]", "test_d[0]"]
