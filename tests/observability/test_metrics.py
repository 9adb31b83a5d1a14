# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl, read back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.observability.metrics import MetricsFile, encode_record, plain_record, read_metrics, set_aside
from megatron_rl.types import UserError


def test_record_is_strict_json_in_a_stable_order(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "run")
    file.log(1, {"tokens/prompt": 3, "kl/mean": float("nan"), "reward/mean": 0.1 + 0.2})
    file.log(2, {"reward/mean": float("-inf")})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()  # before close: every line is flushed
    file.close()
    assert lines == [
        '{"step": 1, "kl/mean": null, "reward/mean": 0.30000000000000004, "tokens/prompt": 3}',
        '{"step": 2, "reward/mean": null}',
    ]


def test_scalars_of_numpy_and_torch_are_numbers() -> None:
    record = plain_record({"c": torch.tensor(0.25), "b": np.int64(3), "a": np.float32(0.5)})
    assert list(record.items()) == [("a", 0.5), ("b", 3), ("c", 0.25)]
    assert [type(value) for value in record.values()] == [float, int, float]


def test_records_are_appended(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.log(1, {"reward/mean": 1.0})
    file.close()
    file = MetricsFile(tmp_path)
    file.log(2, {"reward/mean": 0.5})
    file.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_what_came_after_the_checkpoint_of_a_resumed_run_is_set_aside(tmp_path: Path) -> None:
    """Later records and rollouts are moved, earlier ones keep their bytes, and a cut-off line is deleted."""
    (tmp_path / "rollouts").mkdir()
    for step in range(1, 4):
        (tmp_path / f"rollouts/step_{step}.jsonl").write_text(str(step))
    (tmp_path / "config.yaml").write_text("a: 1\n")
    file = MetricsFile(tmp_path)
    for step in range(4):
        file.log(step, {"reward/mean": 0.1 * step})
    file.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 4, "rew')
    first, second = tmp_path / "attempt-1", tmp_path / "attempt-2"
    assert set_aside(tmp_path, 1) == first and set_aside(tmp_path, 1) is None
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:2])
    assert (first / "metrics.jsonl").read_text() == "".join(lines[2:])
    assert sorted(path.name for path in (first / "rollouts").iterdir()) == ["step_2.jsonl", "step_3.jsonl"]
    assert (first / "config.yaml").read_text() == "a: 1\n" and not list(tmp_path.rglob("*.partial"))
    assert set_aside(tmp_path, -1) == second
    assert (tmp_path / "metrics.jsonl").read_text() == "" and list((tmp_path / "rollouts").iterdir()) == []
    assert (second / "metrics.jsonl").read_text() == "".join(lines[:2])


def test_step_is_no_metric() -> None:
    with pytest.raises(ValueError, match="'step' is not a metric"):
        encode_record(1, {"step": 2})


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + '\n{"step": 2, "rew')
    assert read_metrics(tmp_path) == [{"step": 1}]
    path.write_text('{"step": 1, "rew\n{"step": 2}\n')
    with pytest.raises(UserError) as caught:
        read_metrics(tmp_path)
    assert caught.value.source == f"{path}:1"


def test_a_directory_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no"):
        read_metrics(tmp_path)
