# SPDX-License-Identifier: Apache-2.0
"""Check whether a machine, or all machines of a job, are ready for training.

    python tools/doctor.py                                            # one machine
    torchrun --nnodes 2 --nproc-per-node 8 ... tools/doctor.py        # every rank, and links
    srun python tools/doctor.py --quiet || exit 1                     # in a job prologue

Checks versions, accelerators, fast paths, limits and host names; under torchrun also links, clocks, collectives and
equal code. Exit status on every rank: 0 without problems, 1 for a problem (with --strict also a warning), 2 for a wrong
command line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from tools._arguments import Arguments
from tools._doctor_checks import Finding, Needs, check_machine
from tools._doctor_ranks import check_ranks, gather_findings

SIGNS = {"ok": "  ok      ", "warning": "  WARNING ", "problem": "  PROBLEM "}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__)
    parser.add_argument(
        "--run-dir", type=Path, default=Path("checkpoints"), metavar="DIR", help="where runs are written (checkpoints)"
    )
    parser.add_argument("--disk-gib", type=float, default=10, help="free disk there (10)")
    parser.add_argument("--shared-memory-gib", type=float, default=1, help="free shared memory (1)")
    parser.add_argument("--open-files", type=int, default=1024, help="limit of open files (1024)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a rank waits for the others (60)")
    parser.add_argument("--strict", action="store_true", help="a warning ends with status 1 as well")
    parser.add_argument("--quiet", action="store_true", help="print warnings and problems only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings; - for stdout instead of text")
    return parser


def merge(reports: list[list[Finding]]) -> list[tuple[Finding, list[int]]]:
    """Merge equal findings, with their ranks."""
    ranks: dict[Finding, list[int]] = {}
    for rank, report in enumerate(reports):
        for finding in report:
            ranks.setdefault(finding, []).append(rank)
    return list(ranks.items())


def format_findings(merged: list[tuple[Finding, list[int]]], world_size: int, quiet: bool) -> str:
    """Format a line per finding, advice below it."""
    lines = []
    for finding, ranks in merged:
        if quiet and finding.status == "ok":
            continue
        where = "" if len(ranks) == world_size or finding.status == "ok" else f" [ranks {', '.join(map(str, ranks))}]"
        lines.append(f"{SIGNS[finding.status]}{finding.name}: {finding.found}{where}")
        if finding.advice:
            lines.append(f"            {finding.advice}")
    counts = {status: sum(finding.status == status for finding, _ in merged) for status in SIGNS}
    lines.append(f"{counts['problem']} problems, {counts['warning']} warnings")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    needs = Needs(options.shared_memory_gib, options.disk_gib, options.open_files)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    findings = check_machine(options.run_dir, needs) if local_rank == 0 else []  # once per machine
    rank, reports = 0, [findings]
    if "RANK" in os.environ:
        try:
            more, store, rank, world_size = check_ranks(options.timeout)
            reports = gather_findings(store, rank, world_size, findings + more)
        except (RuntimeError, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            failure = Finding(
                "rendezvous",
                "problem",
                f"rank {os.environ['RANK']}: {reason[:300]}",
                "a rank did not come in time: check MASTER_ADDR, and the other nodes' output",
            )
            reports, rank = [[*findings, failure]], 0
    merged = merge(reports)
    if rank == 0:
        data = [asdict(finding) | {"ranks": ranks} for finding, ranks in merged]
        is_json_only = options.json is not None and str(options.json) == "-"
        if options.json is not None and not is_json_only:
            options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(data, indent=2) if is_json_only else format_findings(merged, len(reports), options.quiet))
    bad = {"problem", "warning"} if options.strict else {"problem"}
    return int(any(finding.status in bad for finding, _ in merged))


if __name__ == "__main__":
    sys.exit(main())
