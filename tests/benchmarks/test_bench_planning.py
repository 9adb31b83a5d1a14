# SPDX-License-Identifier: Apache-2.0
"""The planning benchmark on a small job: its counts; no claim about its seconds."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

SHAPES = Path(__file__).resolve().parents[2] / "docs" / "shapes"


def test_counts_are_those_of_the_plan(tmp_path: Path, capsys) -> None:
    """At equal TP a rank keeps the tensors of its stage and receives the others, one operation each."""
    out = tmp_path / "out.json"
    bench = importlib.import_module("tools.benchmarks.bench_planning")
    assert (
        bench.main(
            [
                f"--hf-config={SHAPES / 'bench_0.4b.json'}",
                "--source=tp=2,pp=2,dp=2",
                "--destination=tp=2",
                "--rank=3",
                f"--json={out}",
            ]
        )
        == 0
    )
    found = json.loads(out.read_text())
    assert found == json.loads(capsys.readouterr().out)
    assert found["num_ranks"] == 8 and found["destination"] == "tp=2" and found["seconds"].keys() == {"plan", "count"}
    assert found["operations"]["local"] + found["operations"]["receives"] == found["num_tensors"]
    assert found["seconds"]["plan"]["cpu"] > 0 and found["process_mib"] > 0
