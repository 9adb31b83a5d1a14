# SPDX-License-Identifier: Apache-2.0
"""The rules on answers as data sets and policies write them; units are not compared, as in MATH's own scorer."""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rewards import mathematics
from megatron_rl.rewards.answers import extract_answer
from megatron_rl.rewards.mathematics import Judge, judge
from megatron_rl.rewards.scoring import COUNTS, exact_match, marks_answer, score_math
from reward_samples import math_equal


@pytest.mark.parametrize(
    "response, truth, expected",
    [
        ("82", "82", 1.0),
        (" 82\n", "82", 1.0),
        ("82.0", "82", 0.0),
        ("", "82", 0.0),
        ("8 2", "82", 0.0),
        ("82", ["81", "82"], 1.0),
        ("82", [], 0.0),
    ],
)
def test_exact_match(response, truth, expected):
    assert exact_match(response, truth) == expected


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} then \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        ("48/2=24\n#### 72", "72"),
        ("#### 1\n#### 1,072 \nmore", "1,072"),
        ("the answer is 42", None),
        (r"\boxed{never closed", None),
        ("####", None),
        (r"\fbox{5}", "5"),
        (r"\boxed 5$", "5"),
        (r"\boxed{4} and \boxed{never", "4"),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


def test_the_way_of_a_data_set_marks_an_answer_there_only():
    text = "Answer: 3\nso\nAnswer: $34$"
    assert [extract_answer(text, source) for source in ("math_dapo", "aime24", "openai/gsm8k", "")] == [
        "$34$",
        "$34$",
        None,
        None,
    ]
    assert score_math(text, "34", "math_dapo")["score"] == 1.0


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"so \boxed{42}", 1.0),
        ("#### 7", 1.0),
        ("the answer is 42", 0.0),
        (r"\boxed{never closed", 0.0),
        ("####", 0.0),
        (r"\boxed{}", 0.0),
    ],
)
def test_marks_answer(text, expected):
    """Whatever the truth is."""
    assert marks_answer(text, "42") == expected


ACCEPTED = {
    "5": [
        "5.",
        "5元",
        "5。",
        "5,",
        "**5**",
        "`5`",
        r"\textbf{5}",
        "$5$",
        r"\(5\)",
        "(5)",
        "+5",
        "5.0",
        "5 m",
        "5km",
        "5th",
        "x = 5",
        "3 + 2 = 5",
        "f(2) = 5",
        "The answer is 5",
        "5 apples.",
        "5 apples (2 red ones)",
        "答案是5",
        "５",
        r"5\text{ cm}^2",
        "5 cm²",
        "5 m/s",
        "5 miles per hour",
        "5 dollars for 2 days",
        "Total: 5",
        r"5^\circ",
        "5 °C",
    ],
    "-5": ["−5", "-5", "-$5", "$-5", r"-5\%"],
    "18": [
        "18 dollars",
        "18 dollars per day for each of the students",
        "$18",
        "18$",
        r"\$18",
        "18 €",
        "€18",
        "USD 18",
        "US$ 18.00",
        "Rs. 18",
        "¥18",
        "18円",
        "18원",
    ],
    "1000": [
        "1 000",
        "1e3",
        "1E+3",
        "1,000",
        "1{,}000",
        r"1,\!000",
        r"1\,000",
        "1\u00a0000",
        "1\u202f000",
        "1'000",
        "1’000",
        "1,000.00",
        "1.000,00",
        r"1 \times 10^3",
        "1 × 10³",
        r"1\cdot 10^{3}",
        "١٠٠٠",
        "1 thousand",
    ],
    "1234567.5": ["1,234,567.50", "12,34,567.5", "1.234.567,5", "1 234 567,5", "1'234'567.5"],
    "50000": ["5万", "50 thousand", "50千"],
    "2000000": ["2 million", "2 million dollars", "$2,000,000", "2.000.000"],
    "50%": ["50", "0.5", "50 percent", r"50\%", "1/2"],
    "0.5": ["50%", "1/2", r"\frac{1}{2}", r"\frac12", r"\dfrac{1}{2}", "½", ".5", "0,5"],
    "2.5": ["2 1/2", r"2\frac{1}{2}", r"2\frac12", "2½", "5/2", "2,5", "2 1/2 cups"],
    "1/3": ["0.333333", "0.3333333333"],
    "1,5": ["5, 1", "1, 5"],
    "x^2+1": ["1+x^2", r"$1+x^2$", "The answer is $x^2+1$"],
    r"3\sqrt{2}": [r"\sqrt{18}", r"3\sqrt{2} \text{ cm}", r"3\sqrt{2} meters"],
    "[1, 2)": ["[1,2)"],
    "(1,2)": ["(1, 2)"],
    r"1 \le x \le 2": ["[1,2]"],
    r"(-\infty,3)\cup(5,\infty)": [r"(-\infty, 3) \cup (5, \infty)"],
    r"\text{Tuesday}": ["Tuesday", "tuesday."],
    r"\text{(A)}": ["A", "(A)"],
    r"\frac{1}{": [r"\frac{1}{"],
}


@pytest.mark.parametrize("truth", ACCEPTED)
def test_math_accepts_what_means_the_same(truth):
    wrong = [answer for answer in ACCEPTED[truth] if math_equal(f"so\n#### {answer}", truth) != 1.0]
    wrong += [
        answer
        for answer in ACCEPTED[truth]
        if math_equal(f"so \\boxed{{{answer}}}.", truth) != 1.0 and answer.count("{") == answer.count("}")
    ]
    assert wrong == []


REFUSED = {
    "5": [
        "5x",
        "5xy",
        "2pi",
        "5!",
        "5 or 6",
        "5 and 6",
        "at least 5",
        "5 apples, 3 pears",
        "6",
        "-5",
        "5^2",
        "500",
        "(5,6)",
        "5e400",
        "",
    ],
    "1": ["1 hour 30 minutes", "1/0", "1.000.000"],
    "1000": ["1.000", "1,00", "1 00"],
    "1.5": ["15", "1,500"],
    "1,5": ["1.5", "15"],
    "0.5%": ["50"],
    "0.333": ["1/3"],
    "[1,2)": ["(1,2)", "[1,2]", "(1,2]"],
    "east": ["seat", "eats"],
    "x = 5": ["y = 5"],
    "x^2+1": ["x^2-1"],
    "18": ["18x", "$180"],
    "82": ["8 2"],
}


@pytest.mark.parametrize("truth", REFUSED)
def test_math_refuses_what_means_something_else(truth):
    assert [answer for answer in REFUSED[truth] if math_equal(f"\\boxed{{{answer}}}", truth) != 0.0] == []


@pytest.mark.parametrize(
    "response, truth, any_score",
    [
        ("el selJ 21as", "21", 1.0),
        ("3+7=10", "10", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        ("it is $\\frac{2}{4}$", "0.5", 1.0),
        ("82", "82", 1.0),
        ("072", "24+48=72\n#### 72", 1.0),
        ("41", "42", 0.0),
        ("", "82", 0.0),
        ("+", "82", 0.0),
        (r"\frac{", "1/2", 0.0),
        ("=====", "5", 0.0),
        ("9" * 5000, "82", 0.0),
        ("\x00\ufffd", "7", 0.0),
    ],
)
def test_unmarked_answers_count_where_asked_only(response, truth, any_score):
    assert score_math(response, truth)["score"] == 0.0
    found = score_math(response, truth, answer="any")
    assert (found["score"], found["unmarked_answers"]) == (any_score, 1.0)


def test_marked_answers_are_not_counted_as_unmarked():
    assert score_math("#### 5", "5") == {
        "score": 1.0,
        "unmarked_answers": 0.0,
        "math_timeouts": 0.0,
        "math_unparsable_truth": 0.0,
    }
    assert score_math(r"\boxed{41} not 42", "42", answer="any")["score"] == 0.0


def test_any_of_several_truths_is_right():
    assert [math_equal("#### 5", truths) for truths in (["4", "5"], ["4"], [])] == [1.0, 0.0, 0.0]


def test_unreadable_truths_are_counted():
    found = score_math(r"\boxed{1}", r"\frac{1}{")
    assert (found["score"], found["math_unparsable_truth"]) == (0.0, 1.0)


@settings(max_examples=60, deadline=None)
@given(
    response=st.text("0123456789+-=^/*(){}\\$.,# boxedfrac", max_size=20), truth=st.text("0123456789/.x", max_size=6)
)
def test_math_never_raises(response, truth):
    """Short texts from the alphabet of answers."""
    found = score_math(f"#### {response}", truth)
    assert found.keys() == {"score", *COUNTS} and set(found.values()) <= {0.0, 1.0}


def test_towers_of_powers_are_refused_before_they_are_computed():
    start = time.monotonic()
    found = [score_math(rf"\boxed{{{tower}}}", "x") for tower in ("9^{9^{9^9}}", "((9^9)^9)^{99999}", "99999!")]
    assert all((score["score"], score["math_timeouts"]) == (0.0, 1.0) for score in found)
    assert time.monotonic() - start < 1


def test_time_is_bounded_in_any_thread():
    """By a child that the kernel ends; the next comparison gets a new one. The upper bound is generous."""
    one, found = Judge(limit_seconds=1.0), []
    slow, equal = (r"\boxed{2^{9999} + \sin(\cos(x))^{99}}", "5"), (r"\boxed{\frac{2}{4}}", r"\boxed{1/2}")

    def compare() -> None:
        start = time.monotonic()
        found.extend([one.compare(*slow), one.compare(*equal), time.monotonic() - start])

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    one.close()
    assert found[:2] == ["timeout", "equal"] and found[2] < 60


def test_a_child_that_starts_too_late_leaves_no_answer_behind(monkeypatch):
    """The late answer of its start would otherwise be the verdict of the next comparison."""
    one = Judge()
    monkeypatch.setattr(mathematics, "_START_SECONDS", 0.0)
    with pytest.raises(TimeoutError):
        one.compare("1/2", "0.5")
    monkeypatch.undo()
    assert one.compare(r"\boxed{\frac{2}{4}}", r"\boxed{1/2}") == "equal"
    one.close()


def test_a_forked_process_has_a_child_of_its_own():
    """With one socket for both, each would read the other's answers."""
    pairs = [(rf"\boxed{{\sqrt{{{n}}}}}", rf"\boxed{{\sqrt{{{n + n % 2}}}}}") for n in range(2, 42)]
    expected = ["equal" if n % 2 == 0 else "different" for n in range(2, 42)]
    assert judge(*pairs[0]) == "equal"  # the child is there
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    other = context.Process(target=lambda: results.put([judge(*pair) for pair in pairs]))
    other.start()
    assert [judge(*pair) for pair in pairs] == expected
    assert results.get() == expected
    other.join()


def test_numbers_need_no_parser(monkeypatch):
    monkeypatch.setattr(mathematics, "judge", lambda *_: pytest.fail("parsed"))
    texts = ("#### 82", "#### 082", r"\boxed{$82.00}", "#### 82 clips", "#### 83")
    assert [math_equal(text, "82") for text in texts] == [1.0, 1.0, 1.0, 1.0, 0.0]
