# SPDX-License-Identifier: Apache-2.0
"""The benchmark of lost engines on a few jobs, one loss each, and on a short soak. Many losses are the benchmark's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from elastic_runs import HF

from megatron_rl.config.fields import dump_yaml
from megatron_rl.run.loading import load_config
from rl_runs import overrides_for
from tools.benchmarks import bench_elastic

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(task: Path, tmp_path: Path) -> Path:
    """Four steps; losses are seen within two seconds."""
    settings = "trainer.total_steps=4", "trainer.save_freq=1", "rollout.silent_seconds=2", "schedule.elastic=true"
    overrides = overrides_for(task, tmp_path / "never", *HF, *settings)
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_yaml(load_config(None, overrides).config))
    return file


def test_jobs_that_lose_an_engine_equal_one_that_does_not(recipe: Path, tmp_path: Path) -> None:
    """In generation, at an update and in a checkpoint; nothing is lost, learned twice or changed."""
    found = tmp_path / "found.json"
    assert bench_elastic.main([str(recipe), "--jobs", "3", "--engines", "4", "--json", str(found)]) == 0
    figures = json.loads(found.read_text())
    assert (figures["passed"], figures["jobs"]) == (3, 3)
    assert [one["moment"] for one in figures["each"]] == ["generation", "update", "checkpoint"]
    assert figures["losses"] == 3 and figures["each"][0]["seen_after"][0] < 5


def test_soak_counts_losses(recipe: Path, tmp_path: Path) -> None:
    """One in every second step; every sample is there."""
    found = tmp_path / "found.json"
    arguments = ["--soak", "--every", "2", "--engines", "2", "--json", str(found)]
    assert bench_elastic.main([str(recipe), *arguments]) == 0
    figures = json.loads(found.read_text())
    assert (figures["steps"], figures["samples"], figures["losses"]) == (4, 4 * 32, 2)
    assert figures["front"]["threads"]["last"] >= 1
