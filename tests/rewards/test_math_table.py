# SPDX-License-Identifier: Apache-2.0
r"""The rule `math` on more than 200 marked answers: no wrong one is accepted, and no right one of the table is missed.

An entry holds a ground truth, answers that are right, and answers that are wrong. An answer that leaves an operation
to the reader ("5/1") is wrong, and so is a rounded irrational number. Not covered: the rule `math_any`
(test_operations_left.py), and single letters behind a number, which are units ("5 K", "5 M").
"""

from __future__ import annotations

import pytest

from megatron_rl.rewards.scoring import score_math

# fmt: off
TABLE = [
    # Words that scale a number or change it.
    ("5", ["5", "five", "Five", "five apples", "The answer is 5", "x = 5", "x = five", r"\text{five}", "5 more apples"],
     ["5 million", "5 thousand", "5 hundred", "5 billion", "5 trillion", "5 dozen", "5 lakh", "5 crore",
      r"5\text{ million}", r"5 \text{ thousand dollars}", "$5 million", "five million", "five thousand", "five dozen"]),
    ("5", ["5.0", "+5", "(5)", r"5\text{ cm}^2", "5 meters squared", "5 m"],
     ["5 squared", "5 cubed", "5 factorial", "5 doubled", "5 halves", "5 half", "5 thirds", "5 tenths", "5 hundredths",
      r"5\text{ squared}", "half of 5", "double 5", "twice 5", "the square of 5", "the cube of 5", "a third of 5",
      "the reciprocal of 5", "the square root of 5", "minus 5", "negative 5", "five squared", "five halves",
      "five thirds", "five and a half", "five point two", "five or six", "fifty-five", "fifty five", "fifteen"]),
    ("5", ["5.", "5 km", "5%", "five%"],
     ["5!", r"5\pi", r"5 \pi", "5 pi", r"5\text{ pi}", r"5\sqrt{2}", "5i", "5x", "5e", r"5^2", "-5", "--5", "- -5",
      "-(-5)", "+-5", r"\pm 5", "|5|", "|-5|", "5:1", "1:5", "5 : 2", "5-", "5/1", "5?", "5 mod 7", "5 or 6", "5, 6",
      "5 and 6", "log 5", "5 base 7", "5_7", "5_{10}"]),
    ("5", [r"\approx 5", "about 5"],
     [r"\neq 5", r"\ne 5", r"\le 5", r"\leq 5", r"\ge 5", r"< 5", "> 5", "≤ 5", "≥ 5", "≠ 5", r"x \neq 5", r"x \le 5",
      r"x < 5", r"5 \le x", r"5\le x", "at most 5", "at least 5", "less than 5", "more than 5", "not 5"]),
    # Scales on both sides.
    ("5000000", ["5 million", "five million", "5,000,000", "5 million dollars", r"5 \times 10^6", "5e6"],
     ["5", "5 thousand", "5 billion", "5000", "five"]),
    ("5 million", ["5 million", "5,000,000", "five million"], ["5", "5 thousand", "five"]),
    ("12", ["12", "twelve", "1 dozen", "one dozen", "12 quarters"], ["1", "one", "a score", "12 dozen", "12 doubled"]),
    ("60", ["5 dozen", "sixty"], ["5", "60 dozen", "six"]),
    ("200", ["2 hundred", "two hundred"], ["2", "two", "two hundred five", "200 hundred"]),
    ("21", ["twenty-one", "twenty one", "Twenty-One students"], ["twenty", "one", "2 1", "twenty-two"]),
    ("0", ["zero", "0", "-0"], ["one", "none of 5"]),
    ("1", ["one", "one apple"],
     ["one half", "one third", "one quarter", "one-half", "one tenth", "one or two", "no one"]),
    ("50%", ["50", "0.5", "50 percent", "1/2", "fifty percent"], ["5", "500%", "0.05", "50 thousand"]),
    # Decimals, fractions, roots.
    ("1/3", ["1/3", "2/6", "0.333333", r"\frac{1}{3}"], ["0.33", "0.3", "3", "1:3", "33"]),
    (r"-\sqrt{2}", [r"-\sqrt{2}", r"-2^{1/2}", r"-\frac{2}{\sqrt{2}}"], ["-1.41421356", "-1.4142", "1.41421356", "-2"]),
    (r"\sqrt{3}", [r"\sqrt{3}", r"\sqrt 3", r"\frac{3}{\sqrt{3}}"], ["1.7320508", "1.73", "3"]),
    ("-1.41421356", ["-1.41421356"], [r"-\sqrt{2}", "1.41421356"]),
    (r"5\pi", [r"5\pi", r"5 \pi", "5 pi", r"10\pi/2"], ["5", "15.7079633", "15.7", r"5\pi^2", "pi"]),
    # Notations that are no number.
    ("101", ["101"], ["101_2", "101_{2}", "101_{10}", "5"]),
    ("101_2", ["101_2", "101_{2}"], ["101", "5", "101_3", "110_2"]),
    ("5:1", ["5:1", "5 : 1"], ["5", "1:5", "5:2", "5.1", "51"]),
    ("3:30", ["3:30"], ["3", "30", "330", "3:31"]),
    (r"x \neq 5", [r"x \neq 5", r"\neq 5"], ["5", "x = 5", r"x \neq 6", r"x \le 5"]),
    (r"\neq 5", [r"\neq 5"], ["5", r"\le 5"]),
    (r"x \le 5", [r"x \le 5", r"x \leq 5", r"\le 5"], ["5", r"x \ge 5", "x < 5", r"x \le 6"]),
    ("5 squared", ["5 squared"], ["5", "5 cubed"]),
    ("5!", ["5!", "120"], ["5", "6!"]),
    ("5 factorial", ["5 factorial"], ["5", "5 squared"]),
    (r"\frac{3}{2}", ["3/2", "1.5", r"1\frac{1}{2}"], ["3:2", "3", "2/3", "three halves of 5"]),
]
# fmt: on
PAIRS = [
    (answer, truth, is_right)
    for truth, *columns in TABLE
    for is_right in (True, False)
    for answer in columns[not is_right]
]


def test_the_table_has_more_than_two_hundred_pairs():
    """Each is there once, and the wrong ones are the majority."""
    assert len(PAIRS) == len({*PAIRS}) > 200
    assert sum(not is_right for *_, is_right in PAIRS) > len(PAIRS) / 2


@pytest.mark.parametrize("mark", ["so \\boxed{{{}}}.", "so\n#### {}"])
@pytest.mark.parametrize("policy", ["marked", "any"])
def test_the_rule_agrees_with_the_table(mark, policy):
    given = [
        (answer, truth, is_right)
        for answer, truth, is_right in PAIRS
        if bool(score_math(mark.format(answer), truth, answer=policy)["score"]) != is_right
    ]
    assert given == []
