# SPDX-License-Identifier: Apache-2.0
"""Files of a run directory are complete at every moment, even if fsync of a new file fails.

Not covered: a machine that loses power.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.config.schema import ObservabilityConfig
from megatron_rl.observability.metrics import format_response, log_path, write_summary
from megatron_rl.observability.run import Run

OFF = ObservabilityConfig(trackers=[])
WRITERS: dict[str, Callable[[Run], object]] = {
    "summary.json": lambda run: write_summary(run.dir),
    "config.yaml": lambda run: run.start(1),
    "rollouts/step_1.jsonl": lambda run: run.write_rollouts(1, [{"response": "new"}]) or run.settle(),
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


def test_a_step_does_not_wait_for_its_rollouts_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing continues behind the caller; the next step waits for it, so that at most one write is pending."""
    run, is_back, fsync = Run(tmp_path, "", 3, OFF, rank=0), threading.Event(), os.fsync
    run.start(None)
    waits: list[bool] = []

    def wait(descriptor: int) -> None:
        waits.append(is_back.wait(10))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", wait)
    run.write_rollouts(1, [{"response": "one"}])
    assert not (tmp_path / "rollouts" / "step_1.jsonl").exists()
    is_back.set()
    run.write_rollouts(2, [{"response": "two"}])
    assert (tmp_path / "rollouts" / "step_1.jsonl").exists()
    run.settle()
    assert json.loads((tmp_path / "rollouts" / "step_2.jsonl").read_text()) == {"response": "two"}
    assert waits == [True, True]
    run.close()


@pytest.mark.parametrize("end", ["next step", "finish", "close"])
def test_rollouts_that_were_not_written_are_reported(end: str, tmp_path: Path) -> None:
    """The file's path is a directory: the next step or the end raises, and `close` logs the error."""
    run = Run(tmp_path, "", 3, OFF, rank=0)
    run.start(None)
    (tmp_path / "rollouts" / "step_1.jsonl").mkdir()
    run.write_rollouts(1, [{"response": "one"}])
    if end != "close":
        with pytest.raises(IsADirectoryError):
            run.write_rollouts(2, []) if end == "next step" else run.finish()
    run.close()
    assert ("IsADirectoryError" in log_path(tmp_path, 0).read_text()) == (end == "close")


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


def test_the_end_shows_the_best_responses_of_the_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal rewards are shown for different prompts; a run resumed after its last step shows them again."""
    texts = {  # prompt_id, sample_index -> response, reward
        (0, 0): ("To solve 9 + 10 + 22,\x1b[2J\u202e we need to", 1.0),
        (0, 1): ("as good, of the same prompt", 1.0),
        (1, 0): ("begin " + "x" * 5000 + " end \udc00", 1),
        (1, 1): ("bad", -1.0),
        (2, 1): ("the best", 1.5),
    }
    rows = [
        {"prompt_id": prompt, "sample_index": sample, "response": text, "reward": reward, "ground_truth": {"a": "4\n1"}}
        for (prompt, sample), (text, reward) in texts.items()
    ]
    shown = []
    for after in (None, 2):
        run = Run(tmp_path, "", 2, OFF, rank=0)
        run.start(after)
        for step in (1, 2) if after is None else ():
            run.write_rollouts(step, rows if step == 2 else [row | {"reward": 9.0} for row in rows])
            run.count({"reward/mean": 0.5})
            run.record(step)
        run.finish()
        run.close()
        shown.append([line for line in capsys.readouterr().out.splitlines() if "best of step" in line])
    truth = "ground truth {'a': '4\\n1'}"
    assert shown[0] == shown[1] and [line.partition("best of step 2: ")[2] for line in shown[0]] == [
        f"reward 1.5, {truth}, response 'the best'",
        f"reward 1, {truth}, response 'To solve 9 + 10 + 22,\\x1b[2J\\u202e we need to'",
        f"reward 1, {truth}, response 'begin {'x' * 53} ... {'x' * 88} end \\udc00'",
    ]
    found = json.loads((tmp_path / "summary.json").read_text())["best_responses"]
    assert [(row["step"], row["prompt_id"], row["sample_index"]) for row in found] == [(2, 2, 1), (2, 0, 0), (2, 1, 0)]
    assert [row["response"] for row in found] == [texts[key][0] for key in ((2, 1), (0, 0), (1, 0))]


@pytest.mark.parametrize("truth", ["", None])
def test_a_response_without_a_ground_truth_is_shown_alone(truth: str | None) -> None:
    assert format_response({"reward": 1.0, "ground_truth": truth, "response": "a"}) == "reward 1, response 'a'"


def test_a_run_without_steps_or_rollouts_shows_no_response(tmp_path: Path) -> None:
    run = Run(tmp_path, "", 0, OFF, rank=0)
    run.start(None)
    run.finish()
    run.close()
    assert json.loads((tmp_path / "summary.json").read_text())["best_responses"] == []
