# SPDX-License-Identifier: Apache-2.0
"""Write docs/gpu_status.md: every branch that only a GPU takes, and the evidence that it ran without one.

    python tools/gpu_status.py             # some minutes: runs and traces the rehearsals
    python tools/gpu_status.py --check     # a second

Exit status 1 if a branch has no entry, under 90 percent were executed, or a rehearsal fails.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from tools._gpu_branches import PACKAGE, ROOT, Branch, list_branches
from tools._trace_branches import trace

PAGE = ROOT / "docs/gpu_status.md"
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

Made by `python tools/gpu_status.py`; do not edit. No GPU has run this program yet. These are all branches that only a
GPU takes: what an `if` does only there, calls of `torch.cuda`, imports of libraries for GPUs. Each has been executed

* by a **rehearsal**: fake tensors that claim to be on a GPU ([Rehearsal](rehearsal.md)),
* by the **recorder** that stands in for CUDA graphs ([The optimizer step](cuda_graph.md)),
* by the model of vLLM's worker on a GPU (**engine**), whose weights and cache are lost while it sleeps,
* or by nothing yet: **none**. On **hardware**: none.

Executed means that the branch ran and that what follows it agreed, not that kernels and drivers do what they say:
`bash launch/first_gpu_run.sh` asks a GPU.
"""


def collect(branches: list[Branch]) -> tuple[dict[Branch, list[str]], list[str]]:
    """Run the tests; return evidence per branch, and failures."""
    lines: dict[str, list[int]] = defaultdict(list)
    for branch in branches:
        lines[str(PACKAGE / branch.file)] += range(branch.line, branch.last + 1)
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
            if branch.is_expression and name != "rehearsal":
                continue
            if any((str(PACKAGE / branch.file), line) in hits for line in range(branch.line, branch.last + 1)):
                found[branch].append(name)
    return found, failed


def format_page(found: Mapping[Branch, list[str]]) -> str:
    """Format the page."""
    share = sum(map(bool, found.values())) / len(found)
    rows = [
        f"\n{len(found)} branches, {share:.0%} executed.\n",
        "| file | function | branch | executed by |",
        "|---|---|---|---|",
    ]
    for branch, names in found.items():
        rows.append(f"| {' | '.join(_quote(part) for part in branch.key)} | {', '.join(names) or 'none'} |")
    return _HEAD + "\n".join(rows) + "\n"


def _quote(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def find_missing(branches: list[Branch], page: str) -> list[Branch]:
    """List branches without entry."""
    return [b for b in branches if f"| {' | '.join(_quote(part) for part in b.key)} | " not in page]


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the page with the source")
    options, branches = parser.parse_args(arguments), list_branches()
    failed: list[str] = []
    if not options.check:
        found, failed = collect(branches)
        PAGE.write_text(format_page(found), encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    missing = find_missing(branches, page)
    for branch in missing:
        print(f"no entry: {branch.file}:{branch.line} {branch.text}")
    for name in failed:
        print(f"failed: {name}")
    executed = sum(line.startswith("| `") and not line.endswith("| none |") for line in page.splitlines())
    share = executed / len(branches)
    print(f"{executed} of {len(branches)} branches that only GPUs take have been executed ({share:.0%})")
    return int(bool(missing or failed) or share < TARGET)


if __name__ == "__main__":
    sys.exit(main())
