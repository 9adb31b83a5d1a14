# SPDX-License-Identifier: Apache-2.0
"""curves.png of full, empty and odd runs. Not covered: how it looks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.observability.curves import plot_curves, smooth

FULL = [
    {"step": 0, "validation/a/accuracy": 0.1, "validation/b/accuracy": 0.2},
    *(
        {
            "step": step,
            "reward/mean": step / 50,
            "kl/mean": 0.0,
            "mismatch/max": 0.01,
            "time/step": 2.0,
            "time/rollout": 1.0,
            "time/custom": 0.5,
        }
        for step in range(1, 50)
    ),
]


@pytest.mark.parametrize(
    "records",
    [FULL, [], [{"step": 1, "reward/mean": None, "mismatch/max": 0.0, "kl/mean": -0.1}], [{"step": 1, "time/step": 1}]],
    ids=["full", "empty", "null", "time only"],
)
def test_every_run_can_be_drawn(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    """Only that a PNG is written."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    path = plot_curves(tmp_path)
    assert path == tmp_path / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_smooth_is_the_mean_of_the_last_values() -> None:
    assert smooth([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_matplotlib_is_imported_on_the_first_call_only() -> None:
    code = "import sys, megatron_rl.observability.curves; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
