# SPDX-License-Identifier: Apache-2.0
"""A run whose reward service dies under it, and one whose reward function hangs: no reward is ever made up."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed import find_free_port, run_ranks
from rl_runs import overrides_for, read_records, train

TOOL = Path(__file__).resolve().parents[1] / "tools" / "reward_service.py"
SETTINGS = [
    "trainer.total_steps=200",
    "trainer.save_freq=1",
    "data.validation_files=[]",
    "rollout.n=2",
    "reward.service_retries=2",
    "reward.timeout_seconds=10",
]


@pytest.fixture
def service() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = find_free_port()
    process = subprocess.Popen([sys.executable, str(TOOL), f"--port={port}"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.02)
    yield process, f"http://127.0.0.1:{port}/score"
    process.kill()
    process.wait()


def kill_after_first_step(process: subprocess.Popen[bytes], run_dir: Path) -> threading.Thread:
    """Kill the service as soon as a step is on disk."""

    def watch() -> None:
        metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_a_dead_service_stops_the_run_with_its_last_checkpoint_in_place(
    task: Path, tmp_path: Path, vllm_imported: None, service: tuple[subprocess.Popen[bytes], str]
) -> None:
    """Retries, then one error on every rank; earlier records and checkpoints are whole."""
    process, url = service
    run_dir = tmp_path / "run"
    overrides = overrides_for(task, run_dir, *SETTINGS, f"reward.function={url}")
    watcher = kill_after_first_step(process, run_dir)
    errors = run_ranks(train, 2, overrides, timeout=170)
    watcher.join()
    assert errors[0] == errors[1] and url in errors[0] and "3 attempt(s)" in errors[0], errors[0]
    steps = [record["step"] for record in read_records(run_dir)]
    assert steps and steps == list(range(1, len(steps) + 1)) and len(steps) < 200
    assert (run_dir / "checkpoints" / "latest" / "huggingface" / "model.safetensors").is_file()
    assert (run_dir / "checkpoints" / "latest").resolve().name == f"step_{steps[-1]}"


def test_a_dead_service_with_fallback_is_counted_and_ends_the_run_where_it_is_asked_too_often(
    task: Path, tmp_path: Path, vllm_imported: None, service: tuple[subprocess.Popen[bytes], str]
) -> None:
    """Nothing is learned from a reward that stands for a missing one."""
    process, url = service
    process.kill()
    process.wait()
    overrides = overrides_for(
        task,
        tmp_path / "run",
        *SETTINGS,
        f"reward.function={url}",
        "reward.service_on_failure=fallback",
        "trainer.total_steps=1",
    )
    errors = run_ranks(train, 2, overrides, timeout=170)
    assert errors[0] is not None and errors[0] == errors[1] and url in errors[0]
    assert "the reward service failed on 16 of 16 responses of step 1; the last time:\n" in errors[0], errors[0]
    (record,) = read_records(tmp_path / "run")
    assert record["reward/service_failures"] == 1.0 and record["reward/mean"] is None
    overrides = [*overrides, f"trainer.run_dir={tmp_path}/counted", "trainer.max_failed_share=1"]
    assert run_ranks(train, 1, overrides, timeout=170) == [None]
    (record,) = read_records(tmp_path / "counted")
    assert record["reward/service_failures"] == 1.0 and record["reward/mean"] is None
    assert record["policy/grad_norm"] == 0.0


def test_a_function_that_hangs_is_reported_with_its_prompt(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    (tmp_path / "reward.py").write_text(
        "import time\ndef score(data_source, solution_str, ground_truth, extra_info):\n"
        "    time.sleep(600 if ground_truth == '17' else 0)\n    return len(solution_str)\n"
    )
    overrides = overrides_for(
        task,
        tmp_path / "run",
        *SETTINGS,
        f"reward.function={tmp_path}/reward.py:score",
        "reward.workers=1",
        "reward.timeout_seconds=1.5",
        "data.shuffle=false",
    )
    started = time.monotonic()
    errors = run_ranks(train, 2, overrides, timeout=170)
    assert errors[0] == errors[1] and "prompt_id 7" in errors[0] and "1.5 s" in errors[0], errors[0]
    assert time.monotonic() - started < 120
