# SPDX-License-Identifier: Apache-2.0
"""Runs whose prompts a curriculum draws: one that changes nothing, and killed ones that resume bit by bit.

What ranks draw is in tests/rollout/test_drawn_stream.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sabotage import Blow, kill, read_rollouts

from distributed import run_ranks
from rl_runs import overrides_for, read_records, train

SETTINGS = [
    "trainer.total_steps=5",
    "trainer.save_freq=1",
    "trainer.log_rollouts=-1",
    "rollout.n=2",
    "data.train_batch_size=4",
]
DRAWN = ["data.curriculum.kind=window", "data.curriculum.explore=0.2"]
SCHEDULES: list[list[str]] = [
    [],
    ["schedule.max_staleness=1", "schedule.steps_per_update=2", "algorithm.importance_sampling=token-truncate"],
]


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward that every second prompt always gets, so that it leaves the window."""
    file = tmp_path_factory.mktemp("reward") / "reward.py"
    file.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1.0 if int(ground_truth) % 4 == 1 else len(solution_str) % 2\n"
    )
    return f"reward.function={file}:score"


def without_curriculum(run_dir: Path) -> list[dict[str, Any]]:
    records = read_records(run_dir)
    return [{key: x for key, x in record.items() if not key.startswith("curriculum/")} for record in records]


def run(task: Path, run_dir: Path, *settings: str, ranks: int = 1) -> Path:
    assert run_ranks(train, ranks, overrides_for(task, run_dir, *SETTINGS, *settings), timeout=150) == [None] * ranks
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["0", "1"])
def test_a_window_of_all_pass_rates_changes_nothing(
    schedule: list[str], reward: str, task: Path, tmp_path: Path, vllm_imported: None
) -> None:
    """Metrics, rollouts and weights are those of a run without a curriculum."""
    off = run(task, tmp_path / "off", reward, *schedule)
    settings = ["data.curriculum.kind=window", "data.curriculum.window=[0,1]"]
    whole = run(task, tmp_path / "whole", reward, *schedule, *settings)
    assert without_curriculum(whole) == read_records(off) and read_rollouts(whole) == read_rollouts(off)
    name = "checkpoints/step_5/huggingface/model.safetensors"
    assert (whole / name).read_bytes() == (off / name).read_bytes()
    assert all(record["curriculum/passed_over"] == 0 for record in read_records(whole) if record["step"])


@pytest.mark.parametrize("schedule", [pytest.param(SCHEDULES[0], marks=pytest.mark.slow), SCHEDULES[1]], ids=["0", "1"])
def test_a_killed_run_draws_the_same_prompts(
    schedule: list[str], reward: str, task: Path, tmp_path: Path, vllm_imported: None
) -> None:
    """On two ranks, killed in its third update; the checkpoint has the pass rates and the drawn prompts."""
    settings = [*SETTINGS, *DRAWN, reward, *schedule]
    whole = run(task, tmp_path / "whole", *settings, ranks=2)
    overrides = overrides_for(task, tmp_path / "killed", *settings)
    assert kill(2, overrides, Blow("update", entry=7))
    killed = run(task, tmp_path / "killed", *settings, ranks=2)
    records = read_records(whole)
    assert read_records(killed) == records and read_rollouts(killed) == read_rollouts(whole)
    assert sum(record.get("curriculum/passed_over", 0) for record in records) > 0
