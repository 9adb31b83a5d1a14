# SPDX-License-Identifier: Apache-2.0
"""The end of a script and of an entry point: one message and the exit status of the error.

Parsing and planning are tested in tests/launch/test_entry_points.py, failures of a running job in test_failures.py
there.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launch_runs import ROOT, environment
from megatron_rl.run.command_line import run_command
from megatron_rl.run.inputs import plan_rl, read_rl_inputs
from megatron_rl.types import Preempted, UserError, mark_reported

USER_ERROR = "error: a\n  source:   b\n  expected: c\n  hint:     d\n"
SETTINGS = ["model.path=m", "data.train_files=[x]", "data.train_batch_size=8"]
PROGRAM = {"name": "x", "description": "", "build_plan": plan_rl, "read_inputs": read_rl_inputs}
SCRIPT = """
from megatron_rl.run.command_line import end_program_on_errors
from megatron_rl.types import Preempted, UserError, mark_reported
end_program_on_errors()
end_program_on_errors()
error = {}
if {}:
    mark_reported(error, {})
raise error
"""


@pytest.mark.parametrize(
    ("error", "reported", "code", "said"),
    [
        ("UserError('a', source='b', expected='c', hint='d')", 0, 2, USER_ERROR),
        ("Preempted('SIGTERM after step 3')", 0, 75, "stopped: SIGTERM after step 3\n"),
        ("ValueError('x')", 1, 1, ""),
        ("UserError('a', source='b', expected='c', hint='d')", 2, 2, ""),
        ("ValueError('x')", 0, 1, None),
    ],
)
def test_a_script_ends_as_an_entry_point(error: str, reported: int, code: int, said: str | None) -> None:
    """Foreign exceptions end it with Python's own traceback; reported ones end it silently."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(error, reported, reported)],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code
    if said is None:
        assert done.stderr.startswith("Traceback") and done.stderr.endswith("ValueError: x\n")
    else:
        assert done.stderr == said


def reported(error: Exception, code: int) -> Exception:
    mark_reported(error, code)
    return error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("a", source="b", expected="c", hint="d"), 2, USER_ERROR),
        (Preempted("x"), 75, "stopped: x\n"),
        (KeyboardInterrupt(), 130, "stopped: interrupted from the keyboard\n"),
        (reported(OSError("y"), 1), 1, ""),
    ],
)
def test_an_entry_point_ends_with_the_code_of_the_error(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> None:
        raise error

    assert run_command(SETTINGS, **PROGRAM, run=fail) == code
    assert capsys.readouterr().err == said


def test_what_nobody_foresaw_before_there_is_a_log_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: object) -> None:
        raise KeyError("z")

    assert run_command(SETTINGS, **PROGRAM, run=fail) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: \nTraceback") and said.endswith("KeyError: 'z'\n")


LEAVING = """
import atexit, sys, threading, time
import torch.distributed as dist
from megatron_rl.run.command_line import leave

class Loud:
    def __del__(self):
        print("taken apart")

loud = Loud()
atexit.register(lambda: print("at exit"))
if "rank" in sys.argv:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print("main", end="")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
leave(7)
"""


@pytest.mark.parametrize("kind, end", [("rank", ""), ("tool", "taken apart\n"), ("launched", "")])
def test_a_rank_ends_what_must_be_ended_and_takes_nothing_apart(kind: str, end: str) -> None:
    """One that torchrun has launched also before it has process groups: taking it apart took 13 s under load."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment |= {"RANK": "0"} if kind == "launched" else {}
    done = subprocess.run([sys.executable, "-c", LEAVING, kind], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (7, "mainthread\nat exit\n" + end), done.stderr


def test_what_only_plans_does_not_start_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """`--world-size 8` without torchrun would train on one rank."""

    def run(*_: object) -> None:
        raise AssertionError("started")

    assert run_command([*SETTINGS, "--world-size", "8"], run=run, **PROGRAM) == 2
    assert "error: --world-size without --dry-run" in capsys.readouterr().err


def test_a_dry_run_reports_all_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*SETTINGS, "rollout.n=0", "actor.lrr=1", "--dry-run"], run=print, **PROGRAM) == 2
    said = capsys.readouterr().err
    assert "error: 2 mistakes\n1. unknown setting 'actor.lrr'" in said and "\n2. rollout.n = 0 is too small\n" in said


def test_a_misspelled_flag_is_recognized(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*SETTINGS, "--dryrun"], run=print, **PROGRAM) == 2
    assert "did you mean --dry-run?" in capsys.readouterr().err


def test_a_python_without_the_packages_names_the_environment() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "launch/pretrain_grpo.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "lacks numpy, yaml, sentencepiece: activate the environment of launch/setup.sh" in done.stderr
