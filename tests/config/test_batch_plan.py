# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic: derived numbers, refused sizes, and the properties that must always hold."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.schema import (
    ActorConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from megatron_rl.run.models import resolve
from megatron_rl.types import UserError


def make_config(
    *,
    tp: int = 1,
    pp: int = 1,
    rollout_tp: int = 1,
    batch: int = 8,
    mini: int | None = None,
    n: int = 4,
    epochs: int = 1,
    steps: int | None = None,
    ppo_epochs: int = 1,
    budget: int = 4096,
) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="policy"),
        data=DataConfig(train_files=["a"], train_batch_size=batch),
        actor=ActorConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            ppo_mini_batch_size=mini,
            ppo_epochs=ppo_epochs,
            max_tokens_per_microbatch=budget,
        ),
        rollout=RolloutConfig(n=n, tensor_model_parallel_size=rollout_tp),
        trainer=TrainerConfig(total_epochs=epochs, total_steps=steps),
    )


def build_plan(config: RunConfig, world_size: int, num_train_prompts: int | None = None) -> BatchPlan:
    """Compute the batch plan of a GRPO run, whose estimator needs groups."""
    return BatchPlan.build(config, world_size, resolve(config), num_train_prompts)


def refusal(config: RunConfig, world_size: int, num_train_prompts: int | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        build_plan(config, world_size, num_train_prompts)
    return caught.value


def test_numbers_of_one_plan() -> None:
    config = make_config(tp=2, pp=2, rollout_tp=2, batch=6, mini=3, n=4, ppo_epochs=2, epochs=2)
    plan = build_plan(config, 8, num_train_prompts=20)
    assert (plan.dp_size, plan.num_engines) == (2, 4)
    assert (plan.rollouts_per_step, plan.rollouts_per_minibatch, plan.rollouts_per_rank) == (24, 12, 6.0)
    assert (plan.rollouts_per_engine_min, plan.rollouts_per_engine_max) == (6, 6)
    policy = build_plan(replace(config, rollout=replace(config.rollout, engine="megatron")), 8, num_train_prompts=20)
    assert (policy.num_engines, policy.rollouts_per_engine_max) == (2, 12), "tp * pp ranks each, in the actor's layout"
    assert "num_engines = world_size / (tp * pp * ep) = 8 / 4 = 2" in policy.formulas()
    config = replace(config, rollout=replace(config.rollout, dispatch="groups"))
    whole = build_plan(config, 8, num_train_prompts=20)
    assert (whole.rollouts_per_engine_min, whole.rollouts_per_engine_max) == (4, 8)
    assert (plan.minibatches_per_epoch, plan.optimizer_steps_per_step) == (2, 4)
    assert plan.longest_sequence == 2048
    assert plan.steps_per_epoch == pytest.approx(20 / 6)
    assert (plan.total_steps, plan.total_optimizer_steps) == (7, 28)


def test_minibatch_defaults_to_the_whole_batch() -> None:
    plan = build_plan(make_config(batch=8), 2)
    assert (plan.ppo_mini_batch_size, plan.minibatches_per_epoch) == (8, 1)


@pytest.mark.parametrize(
    ("epochs", "steps", "prompts", "expected"),
    [(1, None, 16, 2), (1, None, 17, 3), (3, None, 17, 7), (1, 5, 17, 5), (1, 5, None, 5), (1, None, None, None)],
)
def test_total_steps(epochs: int, steps: int | None, prompts: int | None, expected: int | None) -> None:
    assert build_plan(make_config(epochs=epochs, steps=steps), 1, prompts).total_steps == expected


@pytest.mark.parametrize(
    ("config", "world_size", "found", "expected"),
    [
        (make_config(tp=2, pp=2), 6, "6 is no multiple of tp * pp * cp = 2 * 2 * 1 = 4", "a world size of 4 or 8"),
        (make_config(tp=4), 2, "2 is no multiple", "a world size of 4"),
        (make_config(rollout_tp=3), 8, "rollout.tensor_model_parallel_size 3", "of 2 or 4, or a world size of 6 or 9"),
        (
            make_config(batch=12, mini=5),
            1,
            "12 is no multiple of actor.ppo_mini_batch_size 5",
            "ppo_mini_batch_size of 4 or 6, or train_batch_size of 10 or 15",
        ),
        (
            make_config(batch=8, mini=16),
            1,
            "8 is no multiple of actor.ppo_mini_batch_size 16",
            "ppo_mini_batch_size of 8, or train_batch_size of 16",
        ),
        (make_config(batch=8, mini=1, n=4), 8, "4 rollouts for 8 DP ranks", "e.g. actor.ppo_mini_batch_size=2"),
        (make_config(batch=1, n=4), 8, "4 rollouts for 8 DP ranks", "e.g. data.train_batch_size=2"),
        (make_config(n=1), 1, "every advantage would be 0", "2 responses per prompt or more"),
        (make_config(budget=2047), 1, "1024 = 2048 tokens, does not fit", "2048 tokens or more"),
    ],
)
def test_refusals_name_the_nearest_valid_values(config: RunConfig, world_size: int, found: str, expected: str) -> None:
    error = refusal(config, world_size)
    assert found in error.found
    assert expected in error.expected


def test_a_batch_larger_than_the_data_is_refused() -> None:
    error = refusal(make_config(batch=8), 1, num_train_prompts=7)
    assert error.expected == "data.train_batch_size of 7 or less"


def test_formulas_show_the_numbers() -> None:
    formulas = build_plan(make_config(tp=2, batch=6, mini=3), 4, num_train_prompts=20).formulas()
    assert "dp_size = world_size / (tp * pp * cp) = 4 / (2 * 1 * 1) = 2" in formulas
    assert "rollouts_per_step = train_batch_size * n = 6 * 4 = 24" in formulas
    assert "total_steps = ceil(total_epochs * num_train_prompts / train_batch_size) = ceil(1 * 20 / 6) = 4" in formulas
    assert any(line.endswith("6 / 4 * 4 = 6") for line in formulas)
    config = make_config(tp=2, batch=6, mini=3)
    formulas = build_plan(replace(config, rollout=replace(config.rollout, dispatch="groups")), 4).formulas()
    assert any(line.endswith("4 to 8 (responses of a prompt stay together)") for line in formulas)


def test_formulas_without_data_say_so() -> None:
    assert build_plan(make_config(), 1).formulas()[-1].endswith("data not read yet")
    assert "total_steps = trainer.total_steps = 5" in build_plan(make_config(steps=5), 1).formulas()


def test_plan_is_json() -> None:
    plan = build_plan(make_config(), 1, 20)
    assert json.loads(json.dumps(asdict(plan))) == asdict(plan)


@settings(max_examples=200, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 3]),
    rollout_tp=st.integers(1, 6),
    world_size=st.integers(1, 24),
    batch=st.integers(1, 32),
    mini=st.none() | st.integers(1, 32),
    n=st.integers(1, 8),
    prompts=st.integers(1, 100),
    epochs=st.integers(1, 3),
    ppo_epochs=st.integers(1, 2),
)
def test_nothing_is_floored_dropped_or_repeated(
    tp: int,
    pp: int,
    rollout_tp: int,
    world_size: int,
    batch: int,
    mini: int | None,
    n: int,
    prompts: int,
    epochs: int,
    ppo_epochs: int,
) -> None:
    """Either refused, or all products are exact; the order of prompts is not checked."""
    config = make_config(
        tp=tp, pp=pp, rollout_tp=rollout_tp, batch=batch, mini=mini, n=n, epochs=epochs, ppo_epochs=ppo_epochs
    )
    try:
        plan = build_plan(config, world_size, prompts)
    except UserError:
        return
    assert plan.dp_size * tp * pp == world_size == plan.num_engines * rollout_tp
    assert plan.minibatches_per_epoch * plan.rollouts_per_minibatch == plan.rollouts_per_step == batch * n
    spread = plan.rollouts_per_engine_max - plan.rollouts_per_engine_min
    assert spread in (0, 1)
    assert plan.rollouts_per_engine_min * plan.num_engines <= plan.rollouts_per_step
    assert plan.rollouts_per_step <= plan.rollouts_per_engine_max * plan.num_engines
    assert plan.rollouts_per_rank >= 1
    assert plan.total_steps == math.ceil(epochs * prompts / batch)
