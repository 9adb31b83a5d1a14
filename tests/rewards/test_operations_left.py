# SPDX-License-Identifier: Apache-2.0
"""If the ground truth is a number, an answer that restates the question is wrong, in every mode.

The tables hold ground truths and answers. An unfinished answer has the right value and leaves an operation to the
reader. Not covered: questions that require an expression, for which every equal expression is right (see
docs/rewards.md), and number formats that leave nothing open (see test_rules.py).
"""

from __future__ import annotations

import pytest

from megatron_rl.rewards.functions import load_reward_function
from megatron_rl.rewards.scoring import score_math

UNFINISHED = {
    "98": [
        "60 + 38",
        "60+38",
        "60 +38 apples",
        r"60 + 38 \text{ dollars}",
        "$60 + $38",
        "(60 + 38)",
        "((60) + (38))",
        "{60 + 38}",
        "60 plus 38",
        "60 ＋ 38",
        "98 = 60 + 38",
        "x = 60 + 38",
        "The answer is 60 + 38",
        "the sum of 60 and 38",
        "60 + 38 = 60 + 38",
        "60 + 38 =",
        r"\text{60 + 38}",
        "98 + 0",
        "0 + 98",
        "+60 + 38",
        "60 - (-38)",
        "100 - 2",
        "100 − 2",
        "100 – 2",
        "100 minus 2",
        "-(-98)",
        "--98",
        r"\sum_{i=1}^{1} 98",
        "60 and 38 more",
        "60 increased by 38",
    ],
    "41": [
        "9+10+22",
        "9 + 10 + 22",
        "9, 10, 22",
        "9 + 10 + 22, we need to",
        r"9+10+22\text{ is what we need}",
        "41 * 1",
    ],
    "-7": ["3 - 10", "3 + (-10)", "-(7)^1", "-3 - 4", "- 3 - 4"],
    "32": ["2^5", "2^{5}", "2**5", "2⁵", "2^{2+3}", "4 * 8", "32^1", r"\sqrt{1024}", "pow(2, 5)", "64 / 2", "1 << 5"],
    "120": [
        "5!",
        "5! ",
        r"5 \times 4 \times 3 \times 2 \times 1",
        "5 * 24",
        "5 · 24",
        "5 × 24",
        "5 ⋅ 24",
        "5 x 24",
        "5(24)",
        "(5)(24)",
        r"5 \cdot 24",
        r"5\left(24\right)",
        "5 times 24",
        "2(50 + 10)",
        r"\frac{240}{2}",
        r"\frac{120}{1}",
        r"\frac{100+20}{1}",
        r"\binom{16}{2}",
        r"\prod_{i=1}^{5} i",
        "12 * 10",
        "12e1 * 1",
        r"12 \times 10^1",
        r"1.2 \times 10 \times 10",
        "119 + 1",
    ],
    "12": [
        "84/7",
        "84 / 7",
        "84÷7",
        "84 ÷ 7",
        "84∕7",
        "84:7",
        r"84 \div 7",
        r"\frac{84}{7}",
        r"\dfrac{84}{7}",
        r"\tfrac{8.4}{0.7}",
        "84 divided by 7",
        "10 4/2",
        r"10\frac{4}{2}",
        "24 * 1/2",
        "144^{1/2}",
        "144^0.5",
        r"\sqrt{144}",
        "sqrt(144)",
        "√144",
        "square root of 144",
        r"\lfloor 12.5 \rfloor",
        "|-12|",
        "max(3, 12)",
        r"\gcd(24, 36)",
        "gcd(24, 36)",
        "100 mod 88",
        "12 % 100",
        "24 \\% 50",
        r"\log_{10} 10^{12}",
        r"\int_0^{12} 1 dx",
    ],
    "0.5": [
        "1 - 1/2",
        "1.5/3",
        r"\frac{1.5}{3}",
        r"\frac{2-1}{2}",
        r"2^{-1}",
        r"\sin(30^\circ)",
        "25% + 25%",
        "0.25 * 2",
        "50 / 100 * 1",
    ],
    "2.5": ["2 + 1/2", r"2 + \frac{1}{2}", "2 + 0.5", "10 / 4 * 1", "5 * 0.5", r"5 \times 10^{-1} \times 5"],
    "4800": [r"48 \times 10^2", "48 * 10^2", "48 * 100", r"0.48 \times 10^{4}", "4.8 * 1000"],
    "1000": ["10^3", "10 * 100", "10**3", r"10^{3}", r"1000 \times 10^0"],
    "50%": ["25% + 25%", "1 - 50%", "100 / 2 %"],
}
FINISHED = {
    "98": [
        "98",
        "60 + 38 = 98",
        "x = 60 + 38 = 98",
        "98 apples",
        "$98",
        "98.",
        "(98)",
        "{98}",
        r"\{98\}",
        r"\approx 98",
    ],
    "41": ["9+10+22=41", "9 + 10 + 22 = 41 apples", "The answer is 9 + 32 = 41", "The answer is 41"],
    "-7": ["-7", "−7", "-7.0", "3 - 10 = -7", "(-7)", r"-7^\circ"],
    "32": ["2^5 = 32", r"2 \times 16 = 32", r"\log_2 x = 5 \Rightarrow x = 32", r"|x| = 32", r"m\angle ABC = 32^\circ"],
    "0.5": ["1/2", r"\frac{1}{2}", r"\frac12", "½", "0.5", ".5", "50%", r"50\%", "2/4", r"-\frac{-1}{2}"],
    "-1/2": ["-1/2", r"-\frac{1}{2}", r"\frac{-1}{2}", r"\frac{1}{-2}", "-0.5"],
    "2.5": ["2 1/2", r"2\frac{1}{2}", "5/2", "2,5", "2.5 kg", r"2.5\ \text{kg}\cdot\text{m}", "2.5 m/s"],
    "2500": ["2.5e3", "2.5E+3", r"2.5 \times 10^3", r"2.5 \cdot 10^{3}", "2.5 × 10³", "2,500", "2 500", "2.5 thousand"],
    "0.0025": ["2.5e-3", r"2.5 \times 10^{-3}", "1/400", "0.25%"],
    "50%": ["50%", "0.5", "1/2", "50"],
}
UNMARKED = {  # the last number of a text counts in the rule `math_any`
    "41": (
        [
            "41",
            "9 + 10 + 22 = 41",
            "To solve 9 + 10 + 22, add them up: 9 + 10 = 19, and 19 + 22 = 41.",
            "We need 9 + 10 + 22, which is 41 apples.",
            "so it's **41**!",
            "x = 41",
            "The total is $41.00.",
        ],
        [
            "To solve 9 + 10 + 22, we need to",
            "What is 9 + 10 + 22?",
            "9 + 10 + 22 =",
            "(9 + 10 + 22)",
            "$9 + 10 + 22$ is the answer",
            "It is 0 + 41",
            r"It is 1 \times 41",
            "It is 1 * (41)",
            "It is 41 + zero",
            "41^1",
            "82/2",
            r"$\frac{82}{2}$ is it",
            "It is nine plus ten plus twenty-two",
            "0 plus 41",
            r"\sqrt{1681}",
            r"\sqrt{41}",
            "f(41)",
            "- 41",
        ],
    ),
    "0.5": (["so 1/2", r"it is $\frac{2}{4}$", "about 50% of all", "it is 5e-1 or so"], ["it is 1 - 1/2", "1.5/3"]),
    "-3": (["2 - 5 = -3", "it is -3 now", "x = - 3"], ["it is 2 - 5", "0 -3", "so 3"]),
    "2": (["1 + 1 = 2", "it is 3 - 1 = 2 apples"], ["3 - 2", "it is 4 - 2", "2 + 2 - 2"]),
}
PAIRS = [(truth, answer) for truth, answers in UNFINISHED.items() for answer in answers]
TEXTS = ("\\boxed{{{}}}", "so\n#### {}", "Answer: {}")


def test_the_table_has_more_than_a_hundred_unfinished_answers():
    assert len(PAIRS) > 100 and len(set(PAIRS)) == len(PAIRS)


@pytest.mark.parametrize("truth", UNFINISHED)
@pytest.mark.parametrize("policy", ["marked", "any"])
def test_unfinished_answers_are_wrong(truth, policy):
    """Whatever marks them; a bare answer that counts with `any` only is none as well."""
    accepted = [
        text.format(answer)
        for answer in UNFINISHED[truth]
        for text in (*TEXTS, *(["{}", "To solve it: {}"] if policy == "any" else []))
        if score_math(text.format(answer), truth, "math_dapo", policy)["score"]
    ]
    assert accepted == []


@pytest.mark.parametrize("truth", FINISHED)
@pytest.mark.parametrize("policy", ["marked", "any"])
def test_finished_answers_stay_right(truth, policy):
    refused = [
        text.format(answer)
        for answer in FINISHED[truth]
        for text in TEXTS
        if not score_math(text.format(answer), truth, "math_dapo", policy)["score"]
    ]
    assert refused == []


@pytest.mark.parametrize("truth", UNMARKED)
def test_the_last_number_of_an_unmarked_answer(truth):
    right, wrong = UNMARKED[truth]
    assert [text for text in right if not score_math(text, truth, answer="any")["score"]] == []
    assert [text for text in wrong if score_math(text, truth, answer="any")["score"]] == []
    assert not any(score_math(text, truth)["score"] for text in right)


@pytest.mark.parametrize(
    "rule, data_source",
    [
        ("exact", ""),
        ("by_data_source", "openai/gsm8k"),
        ("by_data_source", "lighteval/MATH"),
        ("by_data_source", "HuggingFaceH4/MATH-500"),
        ("by_data_source", "math_dapo"),
        ("by_data_source", "aime2024"),
    ],
)
def test_rules_that_compare_texts_take_none_either(rule, data_source):
    """verl's scorers are among them; the one of GSM8K reads up to the end of the number, which must be the truth."""
    compute = load_reward_function(rule)
    accepted = []
    for truth, answer in PAIRS:
        for text in (*TEXTS, "{}"):
            response = text.format(answer)
            found = compute(data_source=data_source, solution_str=response, ground_truth=truth, extra_info={})
            score = found["score"] if isinstance(found, dict) else found
            accepted += [(text, truth, answer)] if score > 0 else []
    if data_source == "openai/gsm8k":
        assert accepted and all(answer.startswith(truth) and "####" in text for text, truth, answer in accepted)
    else:
        assert accepted == []


@pytest.mark.parametrize("truth", ["9 + 32", "2^5 - x", "3\\sqrt{2}", "12/4", "48 \\times 10^2", "(1, 2)"])
def test_a_ground_truth_with_an_operation_is_compared_by_value(truth):
    same = {
        "9 + 32": ["41", "32 + 9", "40 + 1"],
        "2^5 - x": ["32 - x"],
        "3\\sqrt{2}": [r"\sqrt{18}"],
        "12/4": ["3", "6/2", r"\frac{12}{4}", "1 + 2"],
        "48 \\times 10^2": ["4800", "48 * 100"],
        "(1, 2)": ["(0+1, 2)"],
    }[truth]
    assert [answer for answer in [truth, *same] if not score_math(f"\\boxed{{{answer}}}", truth)["score"]] == []
