# SPDX-License-Identifier: Apache-2.0
"""Runs that end because they have nothing to learn from; failed episodes and services are in test_agents_in_loop.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distributed import run_ranks
from megatron_rl.checkpoint.directory import list_steps
from megatron_rl.rollout.bad_steps import SilentSteps, explain_failures
from megatron_rl.run.grpo import Trainer
from megatron_rl.run.loading import load_config
from megatron_rl.types import EXIT_FAILED, BadStep, UserError, reported_code
from rl_runs import PARTS, overrides_for, read_records, train

CONSTANT = "def score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"


def end(rank: int, world_size: int, overrides: list[str]) -> int | None:
    """Train on a rank, and return the exit code of the error that ends it."""
    os.environ["WORLD_SIZE"] = str(world_size)
    try:
        Trainer.from_config(load_config(None, overrides).config, parts=PARTS).train()
    except UserError as error:
        return reported_code(error)
    return 0


def test_steps_with_equal_rewards_end_a_run(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """On every rank alike; their records and the last checkpoint are whole, and the count survives a restart."""
    (tmp_path / "reward.py").write_text(CONSTANT)
    settings = [f"reward.function={tmp_path}/reward.py:score", "trainer.save_freq=1", "checkpoint.async_save=false"]
    settings += ["trainer.total_steps=5", "data.validation_files=[]"]
    overrides = overrides_for(task, tmp_path / "run", *settings)
    errors = run_ranks(train, 2, [*overrides, "trainer.max_silent_steps=2"])
    assert errors[0] == errors[1] and errors[0] is not None
    assert errors[0].startswith("in 2 step(s) up to step 2 the responses to each prompt had equal rewards")
    records = read_records(tmp_path / "run")
    assert [record["reward/uninformative_groups"] for record in records] == [1.0, 1.0]
    assert {number for number, _ in list_steps(tmp_path / "run/checkpoints")} == {1, 2}
    assert not (tmp_path / "run/summary.json").exists()
    assert run_ranks(end, 1, [*overrides, "trainer.max_silent_steps=3"]) == [EXIT_FAILED]
    assert [record["step"] for record in read_records(tmp_path / "run")] == [1, 2, 3]


def test_a_step_with_a_signal_ends_the_count() -> None:
    steps = SilentSteps(2)
    for step, is_silent in enumerate([True, False, True], 1):
        steps.add(is_silent)
        steps.check(step)
    again = SilentSteps(2)
    again.load_state_dict(steps.state_dict())
    again.add(True)
    with pytest.raises(BadStep, match="in 2 step") as caught:
        again.check(4)
    assert caught.value.exit_code == EXIT_FAILED == 1


def test_failures_of_both_kinds_have_one_reason() -> None:
    """Of episodes and of services half each; the text is the last failure of the first rank that has one."""
    error = explain_failures((2, 2, 4), "step 3", 0.5, ["", "boom\n"], (), {"validation/toy/failed": 0.5})
    assert error.found == "2 of 4 episodes of step 3 failed, and the reward service on all others; the last time:\nboom"
    assert error.metrics == {"validation/toy/failed": 0.5} and "resume from the newest checkpoint" in error.hint
