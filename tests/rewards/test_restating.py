# SPDX-License-Identifier: Apache-2.0
"""Which responses restate their prompt, and that those with a reward are counted.

A run in which the policy learns to: tests/observability/test_planted_runs.py. Not covered: prompts that a response
repeats in other words.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from sample_rollouts import make_prompt
from sample_rollouts import make_rollout as make_described

from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards.answers import RESTATES, restates_prompt
from megatron_rl.rewards.plan import build_reward_plan, open_scorer
from megatron_rl.samples.experience import describe_rollouts
from megatron_rl.samples.table import build_headers
from reward_samples import decode, make_rollout, write_function

SUM = "<|user|>\nWhat is 9 + 10 + 22?<|end|>"
CHOICE = "Which is even? (A) five apples (B) four apples"


@pytest.mark.parametrize(
    "response, prompt, truths, expected",
    [
        ("To solve 9 + 10 + 22, we need to", SUM, ["41"], True),
        ("9+10+22", SUM, ["41"], True),
        ("#### 9+10+22.", SUM, ["so 9+10+22=41\n#### 41"], True),
        (r"\boxed{9 + 10}", SUM, ["41"], True),
        (r"\boxed{WHAT IS 9}", SUM, ["41"], True),
        (r"\boxed{\frac{1}{2} + \frac{1}{3}}", r"$\frac{1}{2}+\frac{1}{3}$?", [r"\frac{5}{6}"], True),
        ("9 + 10 + 22 = 41", SUM, ["41"], False),
        ("9 + 10 = 19, and 19 + 22 = 41", SUM, ["41"], False),
        ("#### 41", SUM, ["41"], False),
        ("#### 22", SUM, ["41"], False),  # one number
        ("22", SUM, ["41"], False),
        ("10, 22", SUM, ["41"], False),  # no operation
        ("#### 0 + 22", "What is 10 + 22?", ["32"], False),  # at the boundaries of numbers only
        ("#### 9 + 10 + 22", SUM + " Hint: 41", ["41"], False),
        (r"\boxed{(A) five apples}", CHOICE, ["B"], False),
        (r"\boxed{(A) five apples}", CHOICE, ["(B) four apples"], False),
        ("What is 9 + 10 + 22?", SUM, ["a story"], False),  # no mark, and not a number
        ("#### 9+10+22", SUM, [], False),
        ("#### 9+10+22", SUM, [""], False),
        ("", SUM, ["41"], False),
    ],
)
def test_which_responses_restate_their_prompt(response, prompt, truths, expected):
    assert restates_prompt(response, prompt, truths) is expected


@pytest.mark.parametrize("truth, reward, expected", [("82", 0.1, True), ("82", 0.0, False), ({"a": 1}, 0.1, False)])
def test_a_rewarded_one_has_a_component(tmp_path, truth, reward, expected):
    """The prompt is "37+45="; a ground truth that is not text has no component. Environments' rewards count too."""
    config = RewardConfig(function=write_function(tmp_path, f"return {reward}"))
    scorer = open_scorer(build_reward_plan(config, 10), decode)
    rollout = replace(make_rollout("37 + 45"), response="")
    rollout = replace(rollout, prompt=replace(rollout.prompt, ground_truth=truth))
    scored = scorer.finish([rollout, replace(rollout, reward=reward)])
    scorer.close()
    assert [each.reward_components for each in scored] == [{RESTATES: 1.0} if expected else {}] * 2


@pytest.mark.parametrize("restating", [0, 3])
def test_the_metric_is_the_share_of_all_responses(restating):
    """Also if no response has the component: the alarm needs every step."""
    rollouts = [(number // 4, make_described(make_prompt(number // 4), number % 4, 5, 1.0)) for number in range(8)]
    rollouts = [
        (group, replace(rollout, reward_components={RESTATES: 1.0} if number < restating else {}))
        for number, (group, rollout) in enumerate(rollouts)
    ]
    assert describe_rollouts(build_headers(rollouts, holder=0))[f"reward/{RESTATES}"] == restating / 8
