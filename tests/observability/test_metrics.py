# SPDX-License-Identifier: Apache-2.0
"""The three sinks of a step, each read back."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.config.schema import ObservabilityConfig
from megatron_rl.observability.metrics import MetricsSink, encode_record, format_console_line, read_metrics
from megatron_rl.types import UserError

PLAIN = ObservabilityConfig(tensorboard=False, progress_bar=False)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_record_is_strict_json_in_a_stable_order(tmp_path: Path) -> None:
    with MetricsSink(tmp_path, 2, PLAIN, True, stream=io.StringIO()) as sink:
        sink.log(1, {"tokens/prompt": 3, "kl/mean": float("nan"), "reward/mean": 0.1 + 0.2})
        sink.log(2, {"reward/mean": float("-inf")})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close: every line is flushed
    assert lines == [
        '{"step": 1, "kl/mean": null, "reward/mean": 0.30000000000000004, "tokens/prompt": 3}',
        '{"step": 2, "reward/mean": null}',
    ]


def test_scalars_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    with MetricsSink(tmp_path, 1, PLAIN, True, stream=io.StringIO()) as sink:
        sink.log(1, {"a": np.float32(0.5), "b": np.int64(3), "c": torch.tensor(0.25)})
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0.5, "b": 3, "c": 0.25}]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    run_dir = tmp_path / "run"
    with MetricsSink(run_dir, 1, ObservabilityConfig(), False, stream=stream) as sink:
        sink.log(1, {"reward/mean": 1.0})
    assert not run_dir.exists() and stream.getvalue() == ""


def test_metrics_of_another_run_are_not_mixed_in(tmp_path: Path) -> None:
    with MetricsSink(tmp_path, 1, PLAIN, True, stream=io.StringIO()) as sink:
        sink.log(1, {"reward/mean": 1.0})
    with pytest.raises(UserError, match="already holds the metrics"):
        MetricsSink(tmp_path, 2, PLAIN, True)
    with MetricsSink(tmp_path, 2, PLAIN, True, after_step=1, stream=io.StringIO()) as sink:
        sink.log(2, {"reward/mean": 0.5})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    """Later steps and a line that was cut off; what stays keeps its bytes. TensorBoard hides the same steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = ObservabilityConfig(tensorboard=True, progress_bar=False)
    with MetricsSink(tmp_path, 4, config, True, stream=io.StringIO()) as sink:
        for step in range(4):
            sink.log(step, {"reward/mean": 0.1 * step})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 4, "rew')
    with MetricsSink(tmp_path, 4, config, True, after_step=1, stream=io.StringIO()) as sink:
        assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:2])
        sink.log(2, {"reward/mean": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, round(event.value, 6)) for event in events.Scalars("reward/mean")]
    assert found == [(0, 0.0), (1, 0.1), (2, 0.5)]
    with MetricsSink(tmp_path, 4, PLAIN, True, after_step=-1, stream=io.StringIO()):
        assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_tensorboard_scalars_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = ObservabilityConfig(tensorboard=True, progress_bar=False)
    with MetricsSink(tmp_path, 2, config, True, stream=io.StringIO()) as sink:
        for step in (1, 2):
            sink.log(step, {"reward/mean": step / 4})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_console_line() -> None:
    metrics = {
        "reward/mean": 0.41237, "validation/math/accuracy": 0.5, "kl/mean": 1.23e-3, "policy/clip_fraction": 0.0125,
        "policy/grad_norm": 0.8412, "mismatch/max": 0.012, "tokens/per_second": 1234.6, "time/step": 3.5,
        "time/update": 1.0, "time/rollout": 2.0,
    }
    assert format_console_line(7, 100, metrics) == (
        "step   7/100 | reward 0.4124 | val math 0.5000 | kl 1.23e-03 | clip 0.0125 | grad 0.841 | "
        "mismatch 1.2e-02 | tok/s 1,235 | 3.50 s: rollout 2.00 update 1.00"
    )


def test_console_line_of_step_zero_shows_validation_only() -> None:
    metrics = {"validation/toy/accuracy": 0.25, "time/validation": 1.5}
    assert format_console_line(0, 9, metrics) == "step 0/9 | val toy 0.2500 | s: validation 1.50"


def test_console_every_keeps_the_last_step_and_validation(tmp_path: Path) -> None:
    stream = io.StringIO()
    config = ObservabilityConfig(tensorboard=False, console_every=4)
    with MetricsSink(tmp_path, 6, config, True, stream=stream) as sink:
        for step in range(1, 7):
            sink.log(step, {"validation/toy/accuracy": 0.5} if step == 3 else {"reward/mean": 1.0})
    assert [line.split(" |")[0] for line in stream.getvalue().splitlines()] == ["step 3/6", "step 4/6", "step 6/6"]


def test_progress_bar_counts_steps_on_a_terminal(tmp_path: Path) -> None:
    """Covers the count and that the line is printed too; not how a terminal draws them."""
    stream = Terminal()
    with MetricsSink(tmp_path, 4, ObservabilityConfig(tensorboard=False), True, stream=stream) as sink:
        sink.log(0, {"validation/toy/accuracy": 0.5})
        sink.log(1, {"reward/mean": 1.0})
        sink.log(4, {"reward/mean": 1.0})
    assert "4/4" in stream.getvalue() and "step 1/4 | reward 1.0000" in stream.getvalue()


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
