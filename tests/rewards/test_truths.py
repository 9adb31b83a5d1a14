# SPDX-License-Identifier: Apache-2.0
"""Ground truths are looked at once, before the run: whether every rule can compare with them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards.plan import build_reward_plan, check_truths
from megatron_rl.types import Prompt, UserError


def check(truths, data_source="sums", has_episodes=False, **settings):
    prompts = [Prompt(10 + i, np.zeros(1, np.int32), "?", truth, data_source) for i, truth in enumerate(truths)]
    return check_truths(build_reward_plan(RewardConfig(**settings), 100), prompts, has_episodes)


def test_truths_that_are_compared_as_text_are_named_once():
    """Only truths recognizable without a parser: a formula that math-verify cannot parse is counted during the run."""
    truths = ["5", r"\frac{1}{2}", "Tuesday", r"\{1,2\}", ["1", r"\frac{1}{"], "}", "...", "48/2=24\n#### 24"]
    assert check(truths, function="math") == [
        "ground truths: 3 cannot be read as mathematics and are compared as text, the first: prompt_id 14, "
        r"'\\frac{1}{'"
    ]
    assert check(truths[:4], function="math") == check(truths, function="exact") == []


def test_blank_truths_are_noted_unless_an_environment_rewards():
    assert check(["", "5", " "], function="math")[0].startswith("ground truths: 2 cannot be read as mathematics")
    assert check(["", "5", " "], function="math", has_episodes=True) == []
    assert "the first: prompt_id 11" in check(["", "}"], function="math", has_episodes=True)[0]


@pytest.mark.parametrize("rule", ["math", "exact", "math_any"])
@pytest.mark.parametrize("truth", [{"target": ["a"]}, ["1", 2]])
def test_a_rule_needs_texts(rule, truth):
    with pytest.raises(UserError, match=f"the rule {rule} cannot compare .* of prompt_id 10"):
        check([truth], function=rule)
    assert check([truth], function="format") == []


@pytest.mark.parametrize(
    "data_source, reason",
    [("sums", ""), ("numina_amc_aime", "PRIME's grader"), ("taco", "a sandbox"), ("hiyouga/geometry3k", "images")],
)
def test_data_sets_without_a_scorer_are_refused(data_source, reason):
    with pytest.raises(UserError, match=f'no scorer for the data_source "{re.escape(data_source)}".*{reason}'):
        check(["1"], data_source, function="by_data_source")
    assert check(["1"], data_source, function="math") == []
    assert check(["1"], "aime24", function="by_data_source") == []
