# SPDX-License-Identifier: Apache-2.0
"""The Python API: three lines replace the entry point, and objects replace names.

Not covered: errors of such a program on several ranks (tests/observability/test_failures.py).
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import megatron_rl
from distributed import run_ranks
from launch_runs import ROOT, assert_succeeded, fork_ranks, run_script
from megatron_rl.algorithms.catalog import RegisteredEstimator
from megatron_rl.engines.local.transformers import HuggingFaceEngine
from megatron_rl.run.inputs import Parts, localize
from megatron_rl.run.loading import load_config
from megatron_rl.run.user_program import enter_parts
from megatron_rl.training.roles.actor import Actor
from megatron_rl.training.roles.critic import Critic
from megatron_rl.training.roles.frozen import Reference
from rl_runs import load_nested, overrides_for, read_records

PROGRAM = """
import sys
import megatron_rl
trainer = megatron_rl.Trainer.from_hf_config(sys.argv[1], sys.argv[2], sys.argv[3:])
trainer.train()
"""


def test_three_lines_do_what_the_entry_point_does(task: Path, tmp_path: Path) -> None:
    """On two ranks the records of both programs are equal to the last bit."""
    (tmp_path / "program.py").write_text(PROGRAM)
    extra = ["rollout.engine=hf", "data.validation_files=[]", "trainer.save_freq=null"]
    recipe = tmp_path / "recipe.yaml"
    overrides = overrides_for(task, tmp_path / "unused", *extra)
    recipe.write_text(yaml.safe_dump(load_nested(overrides)))
    entry = partial(run_script, ROOT / "launch/pretrain_grpo.py", recipe, f"trainer.run_dir={tmp_path}/entry")
    program = tmp_path / "program.py"
    api = partial(run_script, program, f"{task}/model", recipe, f"trainer.run_dir={tmp_path}/api")
    for name, script in (("first", entry), ("second", api)):
        (tmp_path / name).mkdir()
        assert_succeeded(fork_ranks(script, 2, tmp_path / name))
    first, second = read_records(tmp_path / "entry"), read_records(tmp_path / "api")
    assert len(first) == 2 and first == second


def count_digits(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return sum(c.isdigit() for c in solution_str) / 8


def estimate_best(inputs: Any, config: Any) -> torch.Tensor:
    return inputs.expand([float(s == scores.max()) for scores in inputs.grouped_scores() for s in scores])


def plain_loss(inputs: Any, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return -inputs.advantages * inputs.logprobs, inputs.loss_mask & False


class CountingEngine(HuggingFaceEngine):
    """An engine of the user's: the slow one, which also counts."""

    requests = 0

    def add(self, requests: Any) -> None:
        type(self).requests += len(requests)
        super().add(requests)


class CountingActor(Actor):
    updates = 0

    def optim_step(self) -> dict[str, float]:
        type(self).updates += 1
        return super().optim_step()


class CountingReference(Reference):
    scored = 0

    def compute_logprobs(self, batch: Any) -> torch.Tensor:
        type(self).scored += 1
        return super().compute_logprobs(batch)


class LateCritic(Critic):
    built = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        type(self).built += 1
        super().__init__(*arguments, **options)


def train_with_objects(rank: int, world_size: int, task: Path, run_dir: Path) -> dict[str, int]:
    """One rank of two runs in one process: objects for everything, then a reward model and a critic."""
    os.environ["WORLD_SIZE"] = str(world_size)
    settings = load_nested(overrides_for(task, run_dir / "first", "data.validation_files=[]", "trainer.save_freq=null"))
    del settings["reward"]
    megatron_rl.Trainer.from_hf_config(
        task / "model",
        settings,
        reward=count_digits,
        adv_estimator=estimate_best,
        policy_loss=plain_loss,
        engine=CountingEngine,
        actor=CountingActor,
        reference=CountingReference,
    ).train()
    settings["trainer"] |= {"run_dir": str(run_dir / "second"), "total_steps": 1}
    settings["algorithm"] = {"adv_estimator": "gae"}
    megatron_rl.Trainer.from_hf_config(
        str(task / "model"),
        settings,
        engine=CountingEngine,
        critic=LateCritic,
        reward_model=lambda rollouts: [len(rollout.response_tokens) for rollout in rollouts],
    ).train()
    return {
        "requests": CountingEngine.requests,
        "updates": CountingActor.updates,
        "scored": CountingReference.scored,
        "critics": LateCritic.built,
    }


def test_objects_take_the_place_of_names(task: Path, tmp_path: Path) -> None:
    """Each is used, and the run's config.yaml names it; 8 prompts x 4 responses and 2 minibatches a step."""
    counts = run_ranks(train_with_objects, 2, task, tmp_path, timeout=200)
    assert counts == [{"requests": 3 * 16, "updates": 4, "scored": 2, "critics": 1}] * 2
    config = yaml.safe_load((tmp_path / "first/config.yaml").read_text())
    assert config["algorithm"]["adv_estimator"] == "estimate_best"
    assert config["algorithm"]["policy_loss"] == "plain_loss" and config["rollout"]["engine"] == "CountingEngine"
    assert config["reward"]["function"] == f"{__file__}:count_digits"
    first, second = read_records(tmp_path / "first"), read_records(tmp_path / "second")
    assert [r["policy/clip_fraction"] for r in first] == [0, 0] and all(0 < r["reward/mean"] < 1 for r in first)
    assert second[0]["reward/mean"] * 32 == pytest.approx(second[0]["tokens/response"])
    assert second[0]["reward/model"] == second[0]["reward/mean"] and second[0]["value/grad_norm"] > 0


BASE = load_config({"model": {"path": "m"}, "data.train_files": ["t"], "data": {"train_batch_size": 8}}).config


def test_objects_are_checked() -> None:
    """A reward of the wrong form, a name that is taken, and an object beside a setting that it would silence."""
    with pytest.raises(megatron_rl.UserError, match="does not accept the four arguments"):
        enter_parts(Parts(reward=lambda text: 0.0), BASE)

    def grpo(inputs: Any, config: Any) -> torch.Tensor:
        return inputs.expand(np.zeros(len(inputs.scores)))

    with pytest.raises(megatron_rl.UserError, match='"grpo" is registered already'):
        enter_parts(Parts(adv_estimator=grpo), BASE)
    workers = load_config(
        {"model.path": "m", "data": {"train_files": ["t"], "train_batch_size": 8}, "reward": {"workers": 2}}
    ).config
    with pytest.raises(megatron_rl.UserError, match="reward.workers = 2 beside a reward"):
        enter_parts(Parts(reward=count_digits), workers)


def test_reward_models_are_passed_by_path_with_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TRL's `reward_funcs` and `reward_weights`: directories and names of the hub, also two of one name."""
    (tmp_path / "judge.v2").mkdir()
    passed = [str(tmp_path / "judge.v2"), "team/judge", "club/judge@main", count_digits, "math"]
    config = enter_parts(Parts(reward=passed, weights=[0.5, 1, -1, 2, 1]), BASE)
    names = ["model:judge_v2", "model:judge", "model:judge_2", f"{__file__}:count_digits", "math"]
    assert [text.split()[1] for text in config.reward.components] == names
    assert [float(text.split()[0]) for text in config.reward.components] == [0.5, 1, -1, 2, 1]
    monkeypatch.setattr("megatron_rl.data.hub.fetch_model", lambda name, setting: tmp_path / name / "0123")
    found, notes = localize(config)
    paths = {name: given["path"] for name, given in found.reward_model.further.items()}
    wanted = ("judge.v2", "team/judge/0123", "club/judge@main/0123")
    assert paths == {name[6:]: str(tmp_path / path) for name, path in zip(names, wanted, strict=False)}
    assert notes[0] == "reward_model.further.judge.path: team/judge is commit 0123 of the hub" and len(notes) == 2


def test_an_object_may_be_passed_again() -> None:
    """A second run in one process finds the registrations of the first; a registered object keeps its name."""
    from megatron_rl.algorithms.catalog import ADVANTAGE_ESTIMATORS

    entry = RegisteredEstimator(estimate_best, needs_values=False, needs_greedy_baseline=True)
    for _ in range(2):
        entered = enter_parts(Parts(adv_estimator=entry, policy_loss=plain_loss), BASE)
        assert entered.algorithm.policy_loss == "plain_loss"
    known = ADVANTAGE_ESTIMATORS["rloo"]
    assert enter_parts(Parts(adv_estimator=known), BASE).algorithm.adv_estimator == "rloo"


def test_a_mapping_is_read_like_a_recipe() -> None:
    """Unknown and repeated names are refused with the place."""
    with pytest.raises(megatron_rl.UserError, match="the config that was passed"):
        load_config({"model": {"path": "m"}, "actor": {"learning_rat": 1}})
    with pytest.raises(megatron_rl.UserError, match="stands twice"):
        load_config({"actor": {"lr": 1e-6}, "actor.lr": 2e-6})
