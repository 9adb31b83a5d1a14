# SPDX-License-Identifier: Apache-2.0
"""Rewards by data source against fixed values, which verl's scorers computed.

`tools/compare_verl.py` compares random texts with verl's scorers.
"""

from __future__ import annotations

import pytest

from megatron_rl.rewards.functions import load_reward_function

TABLE = [
    ("openai/gsm8k", "so\n#### 1,072", "1072", 1.0),
    ("openai/gsm8k", "#### $72", "72", 0.0),
    ("openai/gsm8k", "#### 72.", "72", 0.0),
    ("openai/gsm8k", "the answer is 72", "72", 0.0),
    ("openai/gsm8k", "#### -5\n#### 6", "6", 1.0),
    ("openai/gsm8k", "#### 72" + " " * 300, "72", 0.0),
    ("lighteval/MATH", r"\boxed{\frac12}", r"\frac{1}{2}", 1.0),
    ("lighteval/MATH", r"\boxed{0.5}", "1/2", 1.0),
    ("lighteval/MATH", r"\boxed{x = 5 \text{ cm}}", "5", 1.0),
    ("lighteval/MATH", r"\boxed 7 $ so", "7 ", 1.0),
    ("lighteval/MATH", r"\fbox{5}", "5", 0.0),
    ("lighteval/MATH", "5", "5", 0.0),
    ("lighteval/MATH", r"\boxed{2\sqrt3}", r"2\sqrt{3}", 1.0),
    ("lighteval/MATH", r"\boxed{1,000}", "1000", 0.0),
    ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{90^\circ}", "90", 1.0),
    ("HuggingFaceH4/MATH-500", r"\boxed{(1,2)}", "(1, 2)", 1.0),
    ("math_dapo", "Answer: 34", "34", {"score": 1.0, "acc": 1.0}),
    ("math", "34", "34", {"score": -1.0, "acc": 0.0}),
    ("math_dapo_reasoning", "Answer: $1,000$ dollars", "1000", {"score": 1.0, "acc": 1.0}),
    ("aime2024", "Answer: 1\nanswer : 2 cm", "2", {"score": 1.0, "acc": 1.0}),
    ("aime25", r"Answer: \boxed{33}", "34", {"score": -1.0, "acc": 0.0}),
    ("math_dapo", r"so \boxed{34}", "34", {"score": 1.0, "acc": 1.0}),
    ("math_dapo", r"\boxed{33} or \boxed{34}", "34", {"score": 1.0, "acc": 1.0}),
    ("math_dapo", r"\boxed{1,000}", "1000", {"score": -1.0, "acc": 0.0}),
    ("math_dapo", r"Answer: 33, \boxed{34}", "34", {"score": -1.0, "acc": 0.0}),
    ("math_dapo", r"\boxed{34}" + "." * 91, "34", {"score": -1.0, "acc": 0.0}),
    ("aime25", r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}", {"score": 1.0, "acc": 1.0}),
    ("aime25", r"\boxed{34", "34", {"score": -1.0, "acc": 0.0}),
    ("searchR1_nq", "<answer>The Beatles!</answer>", {"target": ["Queen", "Beatles"]}, 1.0),
    ("searchR1_nq", "Beatles", {"target": "Beatles"}, 0.0),
    ("searchR1_popqa", "<answer>Beatles" + "</answer>" * 11, {"target": "Beatles"}, 0.25),
]


@pytest.mark.parametrize("data_source, response, truth, expected", TABLE)
def test_scores_by_data_source(data_source, response, truth, expected):
    rule = load_reward_function("by_data_source")
    assert rule(data_source=data_source, solution_str=response, ground_truth=truth, extra_info={}) == expected
