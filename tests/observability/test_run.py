# SPDX-License-Identifier: Apache-2.0
"""The files of a run directory are whole at every moment, wherever the process stands.

The disk fails at the moment when a new file is to be made durable. Not covered: a machine that loses power.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.config.schema import ObservabilityConfig
from megatron_rl.observability.run import Run
from megatron_rl.observability.summary import write_summary

OFF = ObservabilityConfig(tensorboard=False, progress_bar=False)
WRITERS: dict[str, Callable[[Run], object]] = {
    "summary.json": lambda run: write_summary(run.dir),
    "config.yaml": lambda run: run.start(1),
    "rollouts/step_1.jsonl": lambda run: run.write_rollouts(1, [{"response": "new"}]),
    "stopped.json": lambda run: run.note_stop({"step": 2}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_cannot_be_written_keeps_its_old_content(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, "a: 2\n", 3, OFF, rank=0)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / name).write_text("old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        WRITERS[name](run)
    assert (tmp_path / name).read_text() == "old"
    monkeypatch.undo()
    WRITERS[name](run)
    assert (tmp_path / name).read_text() != "old" and not list(tmp_path.rglob("*.partial"))
    run.close()


def test_the_summary_names_saves_that_failed(tmp_path: Path) -> None:
    run = Run(tmp_path, "", 1, OFF, rank=0)
    run.start(None)
    run.failed_saves.append({"step": 1, "error": "the disk is full"})
    run.count({"reward/mean": 1.0})
    run.record(1)
    run.finish()
    run.close()
    assert json.loads((tmp_path / "summary.json").read_text())["failed_saves"] == [
        {"step": 1, "error": "the disk is full"}
    ]
