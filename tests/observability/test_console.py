# SPDX-License-Identifier: Apache-2.0
"""Text of the console at several widths: lines of steps, the summary, and the end of a run. Bars: test_progress.py."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import __version__
from megatron_rl.observability.console import (
    ProgressDisplay,
    format_console_line,
    format_summary,
    list_next_commands,
)
from megatron_rl.observability.progress import Pace

STEP = {
    "reward/mean": 0.41237,
    "reward/format": 0.5,
    "kl/mean": 1.23e-3,
    "policy/clip_fraction": 0.0125,
    "policy/grad_norm": 0.8412,
    "mismatch/max": 0.012,
    "tokens/per_second": 1234.6,
    "time/step": 3.5,
    "time/update": 1.0,
    "time/rollout": 2.0,
}
VALIDATED = STEP | {"policy/grad_norm": 103.4, "time/update": 2.5, "validation/math/accuracy": 0.5}
RECORDED = {
    40: """\
step   7/100 | 3.50 s: rollout 57%
step   8/100 | 3.50 s: update 71%
            val math 0.5000""",
    80: """\
step   7/100 | reward 0.4124 | grad 0.841  | 3.50 s: rollout 57%
step   8/100 | reward 0.4124 | grad 103    | 3.50 s: update 71%
            val math 0.5000""",
    100: """\
step   7/100 | reward 0.4124 | kl 1.23e-03 | grad 0.841  | tok/s 1,235  | 3.50 s: rollout 57%
step   8/100 | reward 0.4124 | kl 1.23e-03 | grad 103    | tok/s 1,235  | 3.50 s: update 71%
            val math 0.5000""",
    200: """\
step   7/100 | reward 0.4124 | format 0.5    | kl 1.23e-03 | clip 0.0125 | grad 0.841  | mismatch 1.2e-02 | tok/s 1,235  | 3.50 s: rollout 57%
step   8/100 | reward 0.4124 | format 0.5    | kl 1.23e-03 | clip 0.0125 | grad 103    | mismatch 1.2e-02 | tok/s 1,235  | 3.50 s: update 71% | val math 0.5000""",  # noqa: E501
}


@pytest.mark.parametrize("width", RECORDED)
def test_lines_of_steps_fit_the_terminal_and_keep_their_columns(width: int) -> None:
    """A narrow terminal has fewer columns, which keep their places when values and phases change."""
    widths: dict[str, int] = {}
    text = "\n".join(
        format_console_line(step, 100, record, width, widths) for step, record in ((7, STEP), (8, VALIDATED))
    )
    assert text == RECORDED[width]
    assert max(map(len, text.splitlines())) <= width


def test_step_zero_shows_validation_only() -> None:
    metrics = {"validation/toy/accuracy": 0.25, "time/validation": 1.5}
    assert format_console_line(0, 9, metrics) == "step 0/9 | 1.50 s: validation | val toy 0.2500"


ROWS = [("model", "models/tiny, float32"), ("rollout", "vllm, 4 engine(s) of tp=1; " + "chunked prefill, " * 6)]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_summary_is_a_table(width: int) -> None:
    lines = format_summary(ROWS, width)
    assert lines[0] == "model    models/tiny, float32" and lines[1].startswith(
        "rollout  vllm, 4 engine(s) of tp=1; chunked"
    )
    assert max(map(len, lines)) <= width and all(line.startswith(" " * 9) for line in lines[2:])
    assert " ".join(" ".join(lines[1:]).split()) == " ".join(f"rollout {ROWS[1][1]}".split())


def _lines(steps: int, seconds: float, **more: float) -> list[int]:
    """Return the steps that a run without a terminal prints."""
    stream = io.StringIO()
    display = ProgressDisplay(Pace(steps), stream=stream)
    for step in range(1, steps + 1):
        extra = {"validation/toy/accuracy": 0.5} if step == 33 else {}
        display.log(step, {"reward/mean": 0.5, "time/step": seconds, **extra})
    return [int(line.split("/")[0].removeprefix("step ")) for line in stream.getvalue().splitlines()]


def test_a_long_run_of_short_steps_prints_every_tenth_without_a_terminal() -> None:
    """And the first, the last, and those with a validation."""
    assert _lines(205, 0.5) == sorted({1, 33, 205, *range(10, 206, 10)})
    assert _lines(200, 0.5) == [*range(1, 201)] and _lines(205, 10.0) == [*range(1, 206)]


def test_the_end_names_the_checkpoint_and_two_commands(tmp_path: Path) -> None:
    assert list_next_commands(tmp_path) == [
        f"read the responses: python tools/view_rollouts.py {tmp_path} --out rollouts.html"
    ]
    (tmp_path / "checkpoints/step_4").mkdir(parents=True)
    (tmp_path / "checkpoints/latest").symlink_to("step_4")
    checkpoint, _, evaluate = list_next_commands(tmp_path)
    assert checkpoint == f"checkpoint: {tmp_path}/checkpoints/step_4"
    assert evaluate == f"evaluate the policy: python tools/evaluate.py {tmp_path}/config.yaml model.path={tmp_path}"


PROGRAM = """
import sys
from megatron_rl.run.command_line import run_command
from megatron_rl.run.inputs import plan_rl, read_rl_inputs

def run(loaded, recipe):
    print("torch" in sys.modules, loaded.config.flags.explain)

sizes = ["data.train_batch_size=8", "actor.ppo_mini_batch_size=8"]
arguments = ["model.path=m", "data.train_files=[x]", *sizes, "--explain"]
sys.exit(run_command(arguments, name="x", description="", build_plan=plan_rl, read_inputs=read_rl_inputs, run=run))
"""


def test_the_first_line_comes_before_heavy_libraries() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    first, second = done.stdout.splitlines()
    assert first == f"megatron_rl {__version__}: command line, 1 rank(s); reading model and data"
    assert second == "False True", "torch is not imported yet, and --explain is read"
