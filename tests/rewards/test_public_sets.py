# SPDX-License-Identifier: Apache-2.0
"""Rewards by data source against fixed values, and against verl's own scorers if a checkout is available.

    VERL=/path/to/verl pytest tests/rewards/test_public_sets.py

The fixed values were computed by verl's scorers.
"""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from types import ModuleType

import pytest

from megatron_rl.rewards.functions import load_reward_function
from megatron_rl.rewards.public_sets import score_gsm8k, score_math_dapo, score_math_set, score_search

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
    ("searchR1_nq", "<answer>The Beatles!</answer>", {"target": ["Queen", "Beatles"]}, 1.0),
    ("searchR1_nq", "Beatles", {"target": "Beatles"}, 0.0),
    ("searchR1_popqa", "<answer>Beatles" + "</answer>" * 11, {"target": "Beatles"}, 0.25),
]


@pytest.mark.parametrize("data_source, response, truth, expected", TABLE)
def test_scores_by_data_source(data_source, response, truth, expected):
    rule = load_reward_function("by_data_source")
    assert rule(data_source=data_source, solution_str=response, ground_truth=truth, extra_info={}) == expected


FRAGMENTS = [
    "1",
    "34",
    "0.5",
    ".5",
    "\\frac",
    "\\frac12",
    "\\frac{1}{2}",
    "\\sqrt",
    "\\sqrt3",
    "{",
    "}",
    "\\boxed{",
    "$",
    " ",
    "\\boxed ",
    "\\fbox{",
    "\\text{ cm}",
    "\\text{and}",
    "\\%",
    "\\$",
    "x=",
    "1/2",
    ",",
    "1,000",
    "a ",
    "dollars",
    "\n",
    "\\left(",
    "^\\circ",
    "\\!",
    "\\\\",
    "Answer: ",
    "#### ",
    "-",
    "\\mbox{m}",
    "tfrac",
    "<answer>",
    "</answer>",
    "The",
]


def _load(root: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"verl_{name}", root / f"verl/utils/reward_score/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif("VERL" not in os.environ, reason="VERL names no checkout of verl")
def test_against_verl(capsys):
    """20,000 random texts made of the scorers' patterns; their printed output is dropped."""
    gsm8k, math, dapo, search = (
        _load(Path(os.environ["VERL"]), name) for name in ("gsm8k", "math_reward", "math_dapo", "search_r1_like_qa_em")
    )
    draw = random.Random(0)
    for _ in range(20_000):
        truth = "".join(draw.choices(FRAGMENTS, k=draw.randrange(1, 4)))
        before, after = ("".join(draw.choices(FRAGMENTS, k=draw.randrange(3))) for _ in range(2))
        response = (
            before
            + draw.choice(["{}", "\\boxed{{{}}}", "Answer: {}", "#### {}", "<answer>{}</answer>"]).format(
                truth if draw.random() < 0.7 else before
            )
            + after
        )
        theirs = dapo.compute_score(response, truth)
        assert score_math_dapo(response, truth) == {"score": theirs["score"], "acc": theirs["acc"]}, (response, truth)
        assert score_gsm8k(response, truth) == gsm8k.compute_score(response, truth), (response, truth)
        assert score_math_set(response, truth) == math.compute_score(response, truth), (response, truth)
        targets = {"target": [truth, "34"]}
        assert score_search(response, targets) == search.compute_score(response, targets), (response, truth)
    capsys.readouterr()
