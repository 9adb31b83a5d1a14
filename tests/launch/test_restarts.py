# SPDX-License-Identifier: Apache-2.0
"""The launch script under real torchrun: a killed rank, a signal, a hang; the job continues with the same numbers.

Not covered: several nodes, SLURM itself (tests/launch/test_launch_scripts.py has stand-ins), GPUs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from sabotage import read_rollouts

from distributed import find_free_port, run_ranks
from launch_runs import ROOT, environment
from megatron_rl.checkpoint.directory import find_problems
from megatron_rl.config.fields import dump_yaml
from megatron_rl.run.loading import load_config
from rl_runs import layout_overrides, overrides_for, read_records, train

pytestmark = pytest.mark.slow
SETTINGS = [
    "trainer.total_steps=14",
    "trainer.save_freq=1",
    "trainer.test_freq=5",
    "checkpoint.keep_last=2",
    "checkpoint.contents=[optimizer]",
    *layout_overrides(2, 1, 1),
]


def start(recipe: Path, run_dir: Path, *extra: str, output: Path, restarts: int = 2) -> subprocess.Popen[str]:
    """The script for several nodes on one, with two ranks."""
    with output.open("w") as file:
        return subprocess.Popen(
            ["bash", "launch/train_multi_node.sh", str(recipe), *extra],
            cwd=ROOT,
            stdout=file,
            stderr=file,
            env=environment(
                NNODES="1",
                NPROC="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(find_free_port()),
                RUN_DIR=str(run_dir),
                MAX_RESTARTS=str(restarts),
                GRACE_SECONDS="60",
            ),
        )


def wait_until(is_true: Callable[[], bool], process: subprocess.Popen[str], output: Path, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()[-4000:]
        time.sleep(0.05)


def last_step(run_dir: Path) -> int:
    text = (run_dir / "metrics.jsonl").read_text() if (run_dir / "metrics.jsonl").exists() else ""
    return text.count("\n") - 1  # one line for step 0


def find_rank(launcher: subprocess.Popen[str], rank: int) -> psutil.Process:
    """The process of a rank below a launch script."""
    for process in psutil.Process(launcher.pid).children(recursive=True):
        if process.environ().get("RANK") == str(rank) and "pretrain_grpo.py" in " ".join(process.cmdline()):
            return process
    raise AssertionError(f"no rank {rank}")


def write_recipe(task: Path, tmp_path: Path, *extra: str) -> Path:
    path = tmp_path / "recipe.yaml"
    overrides = overrides_for(task, tmp_path / "never", *SETTINGS, *extra)
    path.write_text(dump_yaml(load_config(None, overrides).config))
    return path


def test_a_killed_rank_and_a_signal(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """kill -9 of a rank: torchrun starts all again. SIGTERM to the script: 75 within 60 s; the next start continues."""
    recipe, run_dir, output = write_recipe(task, tmp_path), tmp_path / "run", tmp_path / "output"
    job = start(recipe, run_dir, output=output)
    try:
        wait_until(lambda: last_step(run_dir) >= 2, job, output)
        find_rank(job, 1).kill()
        wait_until(lambda: "resumed: " in (run_dir / "logs/rank1.log").read_text(), job, output)
        reached = last_step(run_dir)
        wait_until(lambda: last_step(run_dir) > reached, job, output)
        asked = time.monotonic()
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=100) == 75, output.read_text()[-4000:]
        assert time.monotonic() - asked < 60
    finally:
        end(job)
    assert find_problems(run_dir / "checkpoints/latest") == []
    assert "stopped: SIGTERM after step " in output.read_text() and last_step(run_dir) < 14
    job = start(recipe, run_dir, output=output, restarts=0)
    try:
        assert job.wait(timeout=200) == 0, output.read_text()[-4000:]
    finally:
        end(job)
    whole = tmp_path / "whole"
    assert run_ranks(train, 2, overrides_for(task, whole, *SETTINGS), timeout=170) == [None] * 2
    assert read_records(run_dir) == read_records(whole)
    assert not (run_dir / "stopped.json").exists()


def test_a_killed_engine_on_a_rank_of_its_own(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """kill -9 of a rank that only generates: torchrun starts all again, and no sample is lost or drawn differently."""
    settings = [
        "placement.actor=0",
        "placement.rollout=1",
        *layout_overrides(1, 1, 1),
        "schedule.max_staleness=1",
        "schedule.steps_per_update=2",
        "algorithm.importance_sampling=token-truncate",
        "trainer.total_steps=5",
        "trainer.log_rollouts=-1",
    ]
    recipe, run_dir, output = write_recipe(task, tmp_path, *settings), tmp_path / "run", tmp_path / "output"
    job = start(recipe, run_dir, output=output, restarts=1)
    try:
        wait_until(lambda: last_step(run_dir) >= 2, job, output)
        find_rank(job, 1).kill()
        assert job.wait(timeout=250) == 0, output.read_text()[-4000:]
    finally:
        end(job)
    assert "resumed: " in (run_dir / "logs/rank1.log").read_text()
    whole = tmp_path / "whole"
    assert run_ranks(train, 2, overrides_for(task, whole, *SETTINGS, *settings), timeout=170) == [None] * 2
    found = read_records(run_dir)
    assert found == read_records(whole) and found[-1]["step"] == 5
    assert all(record["schedule/carried"] == 32 for record in found[1:]), "as many as begin one step ahead"
    assert read_rollouts(run_dir) == read_rollouts(whole)


def test_a_hang_is_explained_and_survived(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """Rank 1 sleeps over a reward once; the watchdog ends the job, torchrun starts it again, it comes to its end."""
    marker = tmp_path / "slept"
    (tmp_path / "reward.py").write_text(
        "import os, pathlib, time\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    marker = pathlib.Path({str(marker)!r})\n"
        f"    if os.environ['RANK'] == '1' and os.path.exists({str(tmp_path / 'run/checkpoints/latest')!r}) "
        "and not marker.exists():\n"
        "        marker.touch()\n"
        "        time.sleep(600)\n"
        "    return sum(c.isdigit() for c in solution_str) / 8.0\n"
    )
    recipe = write_recipe(
        task,
        tmp_path,
        f"reward.function={tmp_path}/reward.py:score",
        "trainer.collective_timeout=8",
        "trainer.total_steps=4",
    )
    run_dir, output = tmp_path / "run", tmp_path / "output"
    job = start(recipe, run_dir, output=output, restarts=1)
    try:
        assert job.wait(timeout=200) == 0, output.read_text()[-4000:]
    finally:
        end(job)
    text = output.read_text()
    assert text.count("no progress in 8 s (trainer.collective_timeout): rank 0 waited for rank 1") == 1, text[-4000:]
    assert "phase reward" in text and last_step(run_dir) == 4
    stacks = (run_dir / "logs/rank1.log").read_text()
    assert "stacks of all threads of rank 1" in stacks and "reward.py" in stacks


def end(job: subprocess.Popen[str]) -> None:
    """Kill the rest of a job."""
    if job.poll() is None:
        for process in psutil.Process(job.pid).children(recursive=True):
            os.kill(process.pid, signal.SIGKILL)
        job.kill()
        job.wait()
