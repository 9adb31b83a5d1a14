# SPDX-License-Identifier: Apache-2.0
"""The soak benchmark on six steps of one rank: its slope and its figures. Whether a long run leaks is not covered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed import run_ranks
from megatron_rl.config.fields import dump_yaml
from megatron_rl.run.loading import load_config
from rl_runs import overrides_for
from tools.benchmarks import bench_soak


@pytest.mark.parametrize(
    ("values", "slope"),
    [
        ([9.0, 1.0, 5.0, 7.0, 9.0, 11.0], 2.0),
        ([1.0, 2.0, 4.0, 4.0], 0.0),
        ([3.0], 0.0),
    ],
)
def test_slope_is_that_of_the_last_half(values: list[float], slope: float) -> None:
    found = bench_soak.summarize(values)
    assert found["slope_per_step"] == pytest.approx(slope, abs=1e-9)
    assert (found["first"], found["last"], found["largest"]) == (values[0], values[-1], max(values))


@pytest.mark.slow
def test_figures_of_a_run(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """Every step is measured; a file that the reward function never closes shows in the slope."""
    (tmp_path / "leak.py").write_text(
        "kept = []\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    kept.append(open('/dev/null'))\n"
        "    return float(len(kept) % 2)\n"
    )
    overrides = overrides_for(
        task,
        tmp_path / "run",
        f"reward.function={tmp_path}/leak.py:score",
        "data.validation_files=[]",
        "trainer.save_freq=null",
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_yaml(load_config(None, overrides).config))

    def work(rank: int, world_size: int) -> int:
        return bench_soak.main(
            [str(recipe), "--steps", "6", "data.train_batch_size=4", "--json", str(tmp_path / "found.json")]
        )

    assert run_ranks(work, 1, timeout=150) == [0]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["steps"] == len(found["resident_mib_of_ranks"][0]) == 6 and found["seconds_per_step"] > 0
    (rank,) = found["ranks"]
    assert set(rank) == {"resident_mib", "open_files", "threads", "children", "shm_files", "shm_mib"}
    assert rank["open_files"]["slope_per_step"] == pytest.approx(16), "16 responses per step, a file each"
    assert rank["threads"]["slope_per_step"] == pytest.approx(0, abs=0.1) and rank["resident_mib"]["first"] > 100
