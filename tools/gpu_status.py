# SPDX-License-Identifier: Apache-2.0
"""Write docs/gpu_status.md: every branch that only a GPU takes, and the evidence that it ran, on a GPU or without one.

    python tools/gpu_status.py             # some minutes: runs and traces the rehearsals
    python tools/gpu_status.py --keep      # a second: keeps the page's rehearsals, renews the evidence of hardware
    python tools/gpu_status.py --check     # a second: writes nothing
    python tools/gpu_status.py --record -- launch/pretrain_sft.py RECIPE    # on a GPU

`--record` runs `python` with the arguments after it, and adds the branches that were taken to tools/gpu_hardware.json
if the command succeeds. Several can run at once. A file of another GPU or of other versions is replaced.

Exit status 1 if a branch has no entry, the page is out of date, under 90 percent were executed, or a rehearsal fails;
with `--record` the command's, or 2 without a GPU.
"""

from __future__ import annotations

import fcntl
import json
import platform
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.types import EXIT_USER_ERROR, UserError
from tools._arguments import Arguments
from tools._gpu_branches import PACKAGE, ROOT, Branch, list_branches
from tools._trace_branches import trace

PAGE = ROOT / "docs/gpu_status.md"
HARDWARE = Path(__file__).with_name("gpu_hardware.json")  # device, versions, date, and keys of the branches taken
TARGET = 0.9  # share of branches to execute
# Stand-in for a GPU -> pytest arguments that run it.
EVIDENCE = {
    "rehearsal": (
        "tests/rehearsal/test_rehearse.py",
        "tests/rehearsal/test_gpu_paths.py",
        "-k",
        "every_class or part_of",
    ),
    "recorder": ("tests/rehearsal/test_recorder.py", "-k", "fault or in_every_layout"),
    "engine": ("tests/engines/test_gpu_worker.py", "tests/engines/test_vllm_engine.py", "-k", "gpu or modes"),
}
_HEAD = """# What has run of the program's CUDA branches

Made by `python tools/gpu_status.py`; do not edit. These are all branches that only a GPU takes: what an `if` does only
there, calls of `torch.cuda`, imports of libraries for GPUs. Each has been executed

* on **hardware**, one {device} ({versions}; {date}): {count} of {all} branches,
* by a **rehearsal**: fake tensors that claim to be on a GPU ([Rehearsal](rehearsal.md)),
* by the **recorder** that stands in for CUDA graphs ([The optimizer step](cuda_graph.md)),
* by the model of vLLM's worker on a GPU (**engine**), whose weights and cache are lost while it sleeps,
* or by nothing yet: **none**.

On hardware means that a command took the branch on that GPU and succeeded. With a stand-in, the branch ran and what
follows it agreed, but kernels and drivers took no part. Several GPUs have never run the program.
`bash launch/first_gpu_run.sh` asks a GPU.

{all} branches, {share:.0%} executed.

| file | function | branch | executed by |
|---|---|---|---|
"""


def collect(branches: list[Branch]) -> tuple[dict[Branch, list[str]], list[str]]:
    """Run the rehearsals; return evidence per branch, and failures."""
    lines = _list_lines(branches)
    found: dict[Branch, list[str]] = {branch: [] for branch in branches}
    failed = []
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(trace, ["-m", "pytest", "-q", *arguments], lines, ROOT) for arguments in EVIDENCE.values()]
    for name, run in zip(EVIDENCE, runs, strict=True):
        status, hits = run.result()
        if status:
            failed.append(name)
        for branch in branches:
            # A CPU also executes the line of a conditional expression; only a rehearsal's fake GPU takes the GPU side.
            if _is_hit(branch, hits) and (name == "rehearsal" or not branch.is_expression):
                found[branch].append(name)
    return found, failed


def _list_lines(branches: list[Branch]) -> dict[str, list[int]]:
    lines: dict[str, list[int]] = defaultdict(list)
    for branch in branches:
        lines[str(PACKAGE / branch.file)] += range(branch.line, branch.last + 1)
    return lines


def _is_hit(branch: Branch, hits: Set[tuple[str, int]]) -> bool:
    return any((str(PACKAGE / branch.file), line) in hits for line in range(branch.line, branch.last + 1))


def find_machine() -> dict[str, Any]:
    """Find the GPU and the versions of this machine.

    Raises:
        UserError: there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "this machine has no CUDA device",
            source="--record",
            expected="a GPU: evidence of hardware is what runs on one",
            hint="record on a machine with a GPU, or leave --record out to run the rehearsals",
        )
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    for name in ("vllm", "megatron-core"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {"device": torch.cuda.get_device_name(), "versions": versions}


def record(command: Sequence[str], branches: list[Branch]) -> int:
    """Run a Python command and add the branches that it takes to the file of hardware, unless it fails.

    Returns:
        Exit status of the command.

    Raises:
        UserError: there is no GPU.
    """
    machine = find_machine()
    status, hits = trace(command, _list_lines(branches), Path.cwd())
    if status:
        print(f"nothing recorded: the command ended with status {status}")
        return status
    taken = {branch.key for branch in branches if _is_hit(branch, hits)}
    print(f"the command took {len(taken)} of {len(branches)} branches that only GPUs take")
    with HARDWARE.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # of another command that is recorded at the same time
        known = json.load(file)
        if machine.items() <= known.items():
            taken |= {tuple(key) for key in known["branches"]}
        elif known["branches"]:
            print(f"replaced: {len(known['branches'])} branches of {known['device']}, {known['versions']}")
        found = machine | {"date": date.today().isoformat(), "branches": [b.key for b in branches if b.key in taken]}
        file.seek(0)
        file.write(json.dumps(found, indent=1) + "\n")
        file.truncate()
    return 0


def add_hardware(found: Mapping[Branch, list[str]], hardware: Mapping[str, Any]) -> dict[Branch, list[str]]:
    """Add the evidence of hardware."""
    taken = {tuple(key) for key in hardware["branches"]}
    return {branch: [*names, *(["hardware"] if branch.key in taken else [])] for branch, names in found.items()}


def format_page(found: Mapping[Branch, list[str]], hardware: Mapping[str, Any]) -> str:
    """Format the page of all evidence."""
    head = _HEAD.format(
        device=hardware["device"],
        versions=", ".join(f"{name} {version}" for name, version in hardware["versions"].items()),
        date=hardware["date"],
        count=sum("hardware" in names for names in found.values()),
        all=len(found),
        share=sum(map(bool, found.values())) / len(found),
    )
    return head + "".join(f"{_begin_row(branch)} | {', '.join(names) or 'none'} |\n" for branch, names in found.items())


def _begin_row(branch: Branch) -> str:
    return f"| {' | '.join(_quote(part) for part in branch.key)}"


def _quote(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def read_page(page: str, branches: list[Branch]) -> dict[Branch, list[str]]:
    """Read the evidence except hardware's; a branch without entry is left out."""
    rows = dict(line.rsplit(" | ", 1) for line in page.splitlines() if line.startswith("| `"))
    entries = {branch: rows.get(_begin_row(branch)) for branch in branches}
    return {branch: [name for name in EVIDENCE if name in entry] for branch, entry in entries.items() if entry}


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the page with the source; write nothing")
    parser.add_argument("--keep", action="store_true", help="run no rehearsals: keep their evidence in the page")
    parser.add_argument("--record", action="store_true", help="record the branches that COMMAND takes on a GPU")
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="arguments of python")
    options = parser.parse_args(arguments)
    if options.record != bool(options.command):
        parser.error("--record and the arguments of python belong together: --record -- COMMAND")
    branches = list_branches()
    if options.record:
        try:
            return record(options.command, branches)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_USER_ERROR
    page, hardware = PAGE.read_text(encoding="utf-8"), json.loads(HARDWARE.read_text(encoding="utf-8"))
    found, failed = (read_page(page, branches), []) if options.check or options.keep else collect(branches)
    found = add_hardware(found, hardware)
    problems = [f"no entry: {b.file}:{b.line} {b.text}" for b in branches if b not in found]
    problems += [f"failed: {name}" for name in failed]
    if not options.check:
        PAGE.write_text(format_page(found, hardware), encoding="utf-8")
    elif page != format_page(found, hardware):
        problems.append("the page is out of date: python tools/gpu_status.py --keep")
    print("".join(f"{problem}\n" for problem in problems), end="")
    executed = sum(map(bool, found.values()))
    share = executed / len(branches)
    print(f"{executed} of {len(branches)} branches that only GPUs take have been executed ({share:.0%})")
    return int(bool(problems) or share < TARGET)


if __name__ == "__main__":
    sys.exit(main())
