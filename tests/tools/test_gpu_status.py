# SPDX-License-Identifier: Apache-2.0
"""Recording the branches that commands take on a GPU, here an imitated one; the page that tells the evidence.

Not covered: a real GPU.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import gpu_status
from tools._gpu_branches import Branch

NUMBERS = range(8)
MODULE = "def work(case):\n" + "".join(f"    if case == {n}:\n        value = {n}\n" for n in NUMBERS)
BRANCHES = [Branch("part.py", "work", f"value = {n}", 2 * n + 3, 2 * n + 3, is_expression=n == 2) for n in NUMBERS]
KEYS = [["part.py", "work", f"value = {n}"] for n in NUMBERS]
MACHINE = {"device": "GPU X", "versions": {"Python": "3.12", "torch": "2.11"}}
CALL = "import sys, part; part.work(int(sys.argv[1]))"
CALL_IN_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CALL!r}, sys.argv[1]], check=True)"


@pytest.fixture
def hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty file of hardware, on an imitated GPU, for a package of one module that PYTHONPATH finds."""
    (tmp_path / "part.py").write_text(MODULE)
    file = tmp_path / "hardware.json"
    file.write_text(json.dumps(MACHINE | {"date": "2000-01-01", "branches": []}))
    monkeypatch.setattr(gpu_status, "PACKAGE", tmp_path)
    monkeypatch.setattr(gpu_status, "HARDWARE", file)
    monkeypatch.setattr(gpu_status, "find_machine", lambda: MACHINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return file


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def test_commands_and_their_children_add_branches(hardware: Path) -> None:
    assert gpu_status.record(["-c", CALL, "2"], BRANCHES) == 0
    found = read(hardware)
    assert found["branches"] == [KEYS[2]] and found["date"] > "2026" and MACHINE.items() <= found.items()
    assert gpu_status.record(["-c", CALL_IN_CHILD, "1"], BRANCHES) == 0
    assert read(hardware)["branches"] == [KEYS[1], KEYS[2]]


def test_a_failed_command_adds_nothing(hardware: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = hardware.read_text()
    assert gpu_status.record(["-c", f"{CALL}; sys.exit(7)", "2"], BRANCHES) == 7
    assert hardware.read_text() == before
    assert capsys.readouterr().out == "nothing recorded: the command ended with status 7\n"


def test_commands_at_the_same_time_all_add_theirs(hardware: Path) -> None:
    with ThreadPoolExecutor(len(NUMBERS)) as pool:
        runs = [pool.submit(gpu_status.record, ["-c", CALL, str(n)], BRANCHES) for n in NUMBERS]
    assert [run.result() for run in runs] == [0] * len(NUMBERS)
    assert read(hardware)["branches"] == KEYS


@pytest.mark.parametrize("other", [{"device": "GPU Y"}, {"versions": {"Python": "3.12", "torch": "2.12"}}])
def test_other_hardware_or_versions_replace_the_file(
    other: dict[str, Any], hardware: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware.write_text(json.dumps(MACHINE | {"date": "2000-01-01", "branches": KEYS}))
    monkeypatch.setattr(gpu_status, "find_machine", lambda: MACHINE | other)
    assert gpu_status.record(["-c", CALL, "3"], BRANCHES) == 0
    found = read(hardware)
    assert found["branches"] == [KEYS[3]] and other.items() <= found.items()
    assert "replaced: 8 branches of GPU X" in capsys.readouterr().out


def test_branches_that_are_gone_leave_the_file(hardware: Path) -> None:
    gone = [KEYS[0], ["part.py", "work", "value = 99"], ["gone.py", "", "value = 1"]]
    hardware.write_text(json.dumps(MACHINE | {"date": "2000-01-01", "branches": gone}))
    assert gpu_status.record(["-c", CALL, "1"], BRANCHES) == 0
    assert read(hardware)["branches"] == KEYS[:2]


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "vllm":
            raise gpu_status.metadata.PackageNotFoundError(name)
        return f"1 of {name}"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU X")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(gpu_status.metadata, "version", version)
    assert gpu_status.find_machine() == {
        "device": "GPU X",
        "versions": {
            "Python": ".".join(map(str, sys.version_info[:3])),
            "torch": "2.11.0+cu130",
            "vllm": "not installed",
            "megatron-core": "1 of megatron-core",
        },
    }


def test_recording_is_refused_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_status, "list_branches", lambda: BRANCHES)
    ran = tmp_path / "ran"
    assert gpu_status.main(["--record", "--", "-c", f"open({str(ran)!r}, 'w')"]) == 2
    assert capsys.readouterr().err.startswith("error: this machine has no CUDA device\n") and not ran.exists()


def test_arguments_reach_python_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(gpu_status, "list_branches", lambda: BRANCHES)
    monkeypatch.setattr(gpu_status, "record", lambda command, branches: commands.append(command) or 5)
    command = ["-m", "torch.distributed.run", "--standalone", "run.py", "a.b=[1]", "--", "--check"]
    assert gpu_status.main(["--record", "--", *command]) == 5 and commands == [command]


@pytest.mark.parametrize("arguments", [["--record"], ["--record", "--"], ["--", "run.py"], ["run.py"]])
def test_record_and_a_command_belong_together(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        gpu_status.main(arguments)
    assert end.value.code == 2


def test_the_page_shows_what_ran_on_hardware() -> None:
    found = {BRANCHES[0]: ["rehearsal", "engine"], BRANCHES[1]: ["recorder"], BRANCHES[2]: [], BRANCHES[3]: []}
    changed = ["part.py", "work", "value = 3  # was so"]
    file = MACHINE | {"date": "2026-11-27", "branches": [KEYS[0], KEYS[2], changed]}
    page = gpu_status.format_page(gpu_status.add_hardware(found, file), file)
    assert "* on **hardware**, one GPU X (Python 3.12, torch 2.11; 2026-11-27): 2 of 4 branches,\n" in page
    assert "\n4 branches, 75% executed.\n" in page
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    evidence = ["rehearsal, engine, hardware |", "recorder |", "hardware |", "none |"]
    assert [row.split(" | ")[3] for row in rows] == evidence
    assert gpu_status.read_page(page, BRANCHES[:5]) == found, "hardware's evidence is in its file only"


def test_kept_and_checked_pages_follow_the_file(
    hardware: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, found = tmp_path / "page.md", dict.fromkeys(BRANCHES, ["rehearsal"])
    monkeypatch.setattr(gpu_status, "PAGE", page)
    monkeypatch.setattr(gpu_status, "list_branches", lambda: BRANCHES)
    page.write_text(gpu_status.format_page(found, read(hardware)))
    assert gpu_status.main(["--check"]) == 0
    gpu_status.record(["-c", CALL, "4"], BRANCHES)
    capsys.readouterr()
    assert gpu_status.main(["--check"]) == 1
    assert capsys.readouterr().out.startswith("the page is out of date: python tools/gpu_status.py --keep\n")
    assert gpu_status.main(["--keep"]) == 0 and gpu_status.main(["--check"]) == 0
    assert page.read_text().count("| rehearsal, hardware |") == 1

    monkeypatch.setattr(gpu_status, "list_branches", lambda: [*BRANCHES, Branch("new.py", "", "x = 1", 5, 5, False)])
    capsys.readouterr()
    assert gpu_status.main(["--keep"]) == 1
    assert capsys.readouterr().out.startswith("no entry: new.py:5 x = 1\n")
