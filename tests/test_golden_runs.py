# SPDX-License-Identifier: Apache-2.0
"""Whole runs give the numbers that are written down in tests/golden, on the same kernels to the last bit.

Not covered: GPUs, bfloat16, several nodes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden_runs import GOLDEN, RUNS, carry_out, compare, make_golden_task


@pytest.fixture(scope="module")
def golden_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory made by `make_golden_task`."""
    directory = tmp_path_factory.mktemp("golden")
    make_golden_task(directory)
    return directory


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_its_recording(name: str, golden_task: Path, tmp_path: Path, vllm_imported: None) -> None:
    run = RUNS[name]
    expected = json.loads((GOLDEN / f"{run.recording or name}.json").read_text())
    assert compare(expected, carry_out(run, golden_task, tmp_path / "run")).differences == []
