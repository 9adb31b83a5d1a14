# SPDX-License-Identifier: Apache-2.0
"""One rank of a rehearsal: RANK FILE, then the command line of tools/rehearse.py; writes its report to FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from tools.rehearsal.cuda_guard import load_guard


def main(rank: int, file: Path, arguments: list[str]) -> None:
    """Rehearse one rank."""
    load_guard()  # before torch
    from tools.rehearsal import fake_cuda
    from tools.rehearse import read_rehearsed_job

    job = read_rehearsed_job(arguments)[0]
    fake_cuda.install(job.cluster.memory_bytes, job.cluster.gpus_per_node)
    from tools.rehearsal.rank import rehearse_rank

    file.write_text(json.dumps(rehearse_rank(job, rank)), encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
