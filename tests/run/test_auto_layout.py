# SPDX-License-Identifier: Apache-2.0
"""A run that lays itself out is the run that its config.yaml describes. Not covered: GPUs, several nodes."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from distributed import run_ranks
from golden_runs import compare, observe
from megatron_rl.run.grpo import Trainer
from megatron_rl.run.loading import load_config
from rl_runs import leave_out_curves, overrides_for, train

GIVEN = ["data.validation_files=[]", "rollout.engine=hf", "actor.pipeline_model_parallel_size=2"]


def _train_recipe(rank: int, world_size: int, recipe: Path, run_dir: Path) -> None:
    leave_out_curves()
    os.environ["WORLD_SIZE"] = str(world_size)
    Trainer.from_config(load_config(recipe, [f"trainer.run_dir={run_dir}"]).config, recipe).train()


def test_the_config_of_a_run_that_lays_itself_out(task: Path, tmp_path: Path) -> None:
    """On two ranks without GPUs, by their share of the host's memory: no pipeline for this model."""
    overrides = overrides_for(task, tmp_path / "auto", *GIVEN, "layout=auto")
    assert run_ranks(train, 2, overrides, timeout=120) == [None, None]
    written = yaml.safe_load((tmp_path / "auto/config.yaml").read_text())
    assert written["layout"] == {"mode": "given"}
    assert written["actor"]["pipeline_model_parallel_size"] == 1
    log = (tmp_path / "auto/logs/rank0.log").read_text()
    assert "note: layout auto: actor.pipeline_model_parallel_size=1" in log and "the fastest by prediction" in log
    run_ranks(_train_recipe, 2, tmp_path / "auto/config.yaml", tmp_path / "given", timeout=120)
    found = compare(observe(tmp_path / "auto"), observe(tmp_path / "given"))
    assert found.is_exact and not found.differences and found.counts["weights"] > 20
