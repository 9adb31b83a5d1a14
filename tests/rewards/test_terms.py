# SPDX-License-Identifier: Apache-2.0
"""Weights that follow a schedule, and thresholds, in `reward.components`."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards.plan import build_reward_plan
from megatron_rl.rewards.scoring import RewardPlan, Score, compute_reward
from megatron_rl.training.roles.frozen import add_model_scores
from megatron_rl.types import UserError
from reward_samples import make_rollout


def build(*components: str) -> RewardPlan:
    return build_reward_plan(RewardConfig(components=[*components]), 100)


def reward_at(plan: RewardPlan, step: int, *scores: float) -> tuple[float, dict[str, float]]:
    return compute_reward(plan, [Score(score) for score in scores], make_rollout(), step)


def test_a_weight_follows_its_points() -> None:
    """Constant before the first and after the last point, linear in between; validation is step 0."""
    plan = build("1 math", "0@10,1@20,0.5@40 format")
    expected = {0: 0.0, 10: 0.0, 15: 0.5, 20: 1.0, 30: 0.75, 40: 0.5, 1000: 0.5}
    assert {step: reward_at(plan, step, 2.0, 1.0)[0] - 2.0 for step in expected} == expected
    assert {step: plan.weights_at(step)["format"] for step in expected} == expected
    assert plan.describe_weights(15) == {"reward/weight/format": 0.5}, "constant weights are in config.yaml"


def test_components_are_scores_and_not_weighted() -> None:
    assert reward_at(build("1 math", "0@10,1@20 format"), 5, 1.0, 0.25)[1] == {"math": 1.0, "format": 0.25}


@pytest.mark.parametrize("weight", ["0.3", "-0.1", "1e-3"])
def test_a_constant_schedule_equals_a_weight_bit_for_bit(weight: str) -> None:
    plain, constant = build("1 math", f"{weight} format"), build("1 math", f"{weight}@5 format")
    for step in (0, 5, 77):
        found = reward_at(constant, step, 0.7, 0.9), constant.weights_at(step)
        assert found == (reward_at(plain, step, 0.7, 0.9), plain.weights_at(step))
    assert all(source.term is None for source in plain.sources) and plain.describe_weights(5) == {}


def test_a_threshold_makes_a_score_pass_or_fail() -> None:
    plan = build("1 math", "0.5 format >= 0.25")
    found = {score: reward_at(plan, 1, 0.0, score) for score in (0.2, 0.25, 7.0)}
    assert {score: reward for score, (reward, _) in found.items()} == {0.2: 0.0, 0.25: 0.5, 7.0: 0.5}
    assert [components["format"] for _, components in found.values()] == [0.0, 1.0, 1.0], "what counts is logged"


def test_a_source_counts_only_if_another_scores_enough() -> None:
    """Wherever the other one is in the list."""
    for plan, scores in (
        (build("0.5 format if math >= 1", "1 math"), lambda right: (0.8, right)),
        (build("1 math", "0.5 format if math >= 1"), lambda right: (right, 0.8)),
    ):
        assert reward_at(plan, 1, *scores(1.0))[0] == 1.4 and reward_at(plan, 1, *scores(0.9))[0] == 0.9
        assert reward_at(plan, 1, *scores(0.9))[1]["format"] == 0.0


def test_schedule_and_both_thresholds_together() -> None:
    plan = build("1 math", "0@0,1@100 format >= 0.5 if math >= 1")
    assert reward_at(plan, 25, 1.0, 0.6)[0] == 1.25 and reward_at(plan, 25, 1.0, 0.4)[0] == 1.0
    assert plan.sources[1].target == "format"


def test_a_reward_model_has_them_too() -> None:
    """Each rollout with the weight of its own step."""
    plan = build("1 math", "0@0,1@10 model >= 0.5 if math >= 1")
    (model,), rewards = plan.models, np.array([1.0, 0.0, 1.0, 1.0])
    others, steps = {"math": np.array([1.0, 0.0, np.nan, 1.0])}, np.array([5, 5, 5, 10])
    found = add_model_scores(model, rewards, np.array([0.9, 0.9, 0.9, 0.5]), [""] * 4, others, steps)
    assert found.tolist() == [1.5, 0.0, 1.0, 2.0]


WRONG = {
    "0@5,1@5 math": "is not a weight, a source",
    "1,2 math": "is not a weight and a source",
    "1@ math": "is not a weight, a source",
    "nan@1 math": "is not a weight, a source",
    "1 math >= much": "is not a weight, a source",
    "1 math if exact": "is not a weight, a source",
    "1 math if format >= 1": 'asks for the score of "format"',
    "1 math if math >= 1": 'asks for the score of "math"',
    "1 math if model >= 1": 'asks for the score of "model"',
    "1 math if exact_2 >= 1": 'asks for the score of "exact_2"',
}


@pytest.mark.parametrize("component", WRONG)
def test_wrong_entries_are_refused_with_their_place(component: str) -> None:
    with pytest.raises(UserError, match=WRONG[component]) as caught:
        build("1 exact", "0.5 exact >= 1", "1 model", component)
    assert caught.value.source == "reward.components[3]"
