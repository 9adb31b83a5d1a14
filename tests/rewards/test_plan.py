# SPDX-License-Identifier: Apache-2.0
"""From the reward section to a weighted sum, by hand-computed numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.config.schema import REWARD_RULES, RewardConfig
from megatron_rl.rewards.plan import build_reward_plan
from megatron_rl.rewards.scoring import RULES, Score, compute_reward
from megatron_rl.training.roles.frozen import add_model_scores
from megatron_rl.types import UserError
from reward_samples import make_rollout, write_function

URL = "http://localhost:8700/score"


@pytest.mark.parametrize(
    "settings, target",
    [
        ({}, "math"),
        ({"function": "format"}, "format"),
        ({"function": "F"}, "F"),
        ({"function": URL}, URL),
    ],
)
def test_single_source_by_precedence(tmp_path, settings, target):
    function = write_function(tmp_path, "return 1.0")
    settings = {name: function if value == "F" else value for name, value in settings.items()}
    plan = build_reward_plan(RewardConfig(**settings), 100)
    (source,) = plan.sources
    assert source.target == (function if target == "F" else target)
    assert (source.weight, plan.models, plan.is_sum) == (1.0, (), False)
    assert (source.function is None) == (target == URL)


def test_components_overrule_and_have_unique_names(tmp_path):
    one = write_function(tmp_path, "return 1.0", "one.py")
    two = write_function(tmp_path, "return 2.0", "two.py")
    components = ["1.0 math", f"-0.5 {one}", f"  2e-1   {two}", "0.25 model", f"1 {URL}"]
    plan = build_reward_plan(RewardConfig(function="exact", components=components), 100)
    assert [(s.name, s.weight, s.target) for s in plan.sources] == [
        ("math", 1.0, "math"),
        ("f", -0.5, one),
        ("f_2", 0.2, two),
        ("service", 1.0, URL),
    ]
    assert plan.sources[2].setting == "reward.components[2]"
    assert [model.weight for model in plan.models] == [0.25] and plan.is_sum


def test_both_rules_of_mathematics_have_one_metric():
    """`math_any` was a mode of `math`; beside it, it has a number."""
    assert [s.name for s in build_reward_plan(RewardConfig(components=["1 math_any", "1 exact"]), 100).sources] == [
        "math",
        "exact",
    ]
    plan = build_reward_plan(RewardConfig(components=["1 math", "0.5 math_any if format >= 1", "0 format"]), 100)
    assert {s.name: s.target for s in plan.sources} == {"math": "math", "math_2": "math_any", "format": "format"}
    assert tuple(RULES) == REWARD_RULES


def test_names_of_other_metrics_are_not_taken(tmp_path):
    (tmp_path / "r.py").write_text("def mean(data_source, solution_str, ground_truth, extra_info): return 1")
    plan = build_reward_plan(RewardConfig(components=[f"1 {tmp_path / 'r.py'}:mean"]), 100)
    assert plan.sources[0].name == "mean_2", "reward/mean is the mean reward"


@pytest.mark.parametrize(
    "components, message",
    [
        (["math"], "not a weight and a source"),
        (["one math"], "not a weight"),
        (["nan math"], "not a weight"),
        (["1.0 "], "not a weight"),
        (["1 model", "2 model"], "given 2 times"),
        (["1 maths"], "names no function"),
        (["1 http:///score"], "names no host"),
        (["1 nowhere.py:f"], "does not exist"),
    ],
)
def test_components_that_cannot_be_used(components, message):
    with pytest.raises(UserError, match=message) as caught:
        build_reward_plan(RewardConfig(components=components), 100)
    assert caught.value.source.startswith("reward.components")


def test_single_source_logs_its_own_components_only():
    plan = build_reward_plan(RewardConfig(), 100)
    assert compute_reward(plan, [Score(0.5, {"level": 3.0})], make_rollout()) == (0.5, {"level": 3.0})
    taken = {"mean": 1.0, "uninformative_groups": 2.0, "overlong": 3.0, "unmarked": 4.0}
    assert compute_reward(plan, [Score(0.5, taken)], make_rollout())[1] == {
        "math/mean": 1.0,
        "math/uninformative_groups": 2.0,
        "math/overlong": 3.0,
        "unmarked": 4.0,
    }


def test_sum_logs_raw_scores_by_source():
    plan = build_reward_plan(RewardConfig(components=["2 math", "-0.5 format", f"1 {URL}", f"1 {URL}2"]), 100)
    scores = [
        Score(0.75),
        Score(1.0, {"part": 4.0}),
        Score(0.125, {"service_failures": 1.0}),
        Score(0.0, {"service_failures": 1.0}),
    ]
    assert compute_reward(plan, scores, make_rollout()) == (
        2 * 0.75 - 0.5 + 0.125,
        {"math": 0.75, "format": 1.0, "format/part": 4.0, "service": 0.125, "service_2": 0.0, "service_failures": 2.0},
    )


def test_model_comes_second():
    plan = build_reward_plan(RewardConfig(components=["1 math", "0.5 model"]), 100)
    reward, _ = compute_reward(plan, [Score(1.0)], make_rollout())
    (model,), rewards, titles = plan.models, np.array([0.0, reward]), ["rollout 0", "rollout 1"]
    assert add_model_scores(model, rewards, np.array([1.0, -3.0]), titles).tolist() == [0.5, -0.5]
    with pytest.raises(UserError, match="gave nan to rollout 1"):
        add_model_scores(model, rewards, np.array([1.0, math.nan]), titles)
    with pytest.raises(UserError, match="the reward is -1e\\+30(.|\n)*rollout 0"):
        add_model_scores(model, rewards, np.array([-2e30, 1.0]), titles)
    with pytest.raises(UserError, match=r"gave \[1\] scores to 2 rollouts"):
        add_model_scores(model, rewards, np.array([1.0]), titles)
    alone = build_reward_plan(RewardConfig(components=["2 model"]), 100)
    assert alone.sources == () and compute_reward(alone, [], make_rollout()) == (0.0, {})


@pytest.mark.parametrize(
    "length, expected",
    [(0, 0.0), (80, 0.0), (81, -0.5 / 20), (90, -0.25), (99, -0.5 * 19 / 20), (100, -0.5), (120, -0.5)],
)
def test_overlong_penalty_by_hand(length, expected):
    """Equation 13 of DAPO with L_max = 100, L_cache = 20, times 0.5."""
    plan = build_reward_plan(RewardConfig(overlong_buffer_length=20, overlong_penalty=0.5), 100)
    reward, components = compute_reward(plan, [Score(0.0)], make_rollout("x" * length))
    assert reward == components["overlong"] == pytest.approx(expected, abs=1e-15)


def test_overlong_penalty_is_added_and_logged():
    plan = build_reward_plan(RewardConfig(overlong_buffer_length=20), 100)
    assert compute_reward(plan, [Score(1.0)], make_rollout("x" * 95)) == (0.25, {"overlong": -0.75})
    reward, components = compute_reward(plan, [Score(1.0)], make_rollout("x" * 10))
    assert (reward, components) == (1.0, {"overlong": 0.0}) and math.copysign(1, components["overlong"]) == 1


@pytest.mark.parametrize("reward", [1e308, -1e19, float("inf")])
def test_the_sum_of_an_episode_is_bounded_as_every_reward_is(reward):
    plan = build_reward_plan(RewardConfig(), 8)
    with pytest.raises(UserError, match="the reward is ") as caught:
        compute_reward(plan, [], replace(make_rollout("82"), reward=reward))
    assert "agents.environment" in caught.value.source and "prompt_id 17" in caught.value.found


def test_further_reward_models_have_names_and_weights() -> None:
    """A model's name in the logs is unique as a function's; it gives way to names of other metrics."""
    components = ["0.5 model", f"0.3 {URL}", "-2 model:safety", "1 model:mean", "1 model:math", "1 math"]
    plan = build_reward_plan(RewardConfig(components=components), 100)
    assert [(model.name, model.weight, model.target) for model in plan.models] == [
        ("model", 0.5, "model"),
        ("safety", -2.0, "model:safety"),
        ("mean_2", 1.0, "model:mean"),
        ("math", 1.0, "model:math"),
    ]
    assert [source.name for source in plan.sources] == ["service", "math_2"]


@pytest.mark.parametrize(
    ("components", "found", "hint"),
    [
        (["0.5 model", "0.5 model"], 'the source "model" is given 2 times', "add up the weights"),
        (["1 model:a", "2 model:b", "3 model:a"], 'the source "model:a" is given 2 times', "add up the weights"),
        (["nan model:a"], '"nan model:a" is not a weight and a source', "0.3 model:NAME"),
    ],
)
def test_mistakes_in_the_weights_of_models(components: list[str], found: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        build_reward_plan(RewardConfig(components=components), 100)
    error = caught.value
    assert found in error.found and hint in error.hint and error.expected and "reward.components" in error.source
