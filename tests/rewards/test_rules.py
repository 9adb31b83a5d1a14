# SPDX-License-Identifier: Apache-2.0
"""The rules on answers as data sets and policies write them."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rewards import rules
from megatron_rl.rewards.rules import exact_match, extract_answer, marks_answer, math_equal


@pytest.mark.parametrize("response, truth, expected", [
    ("82", "82", 1.0), (" 82\n", "82", 1.0), ("82.0", "82", 0.0), ("", "82", 0.0), ("8 2", "82", 0.0)])
def test_exact_match(response, truth, expected):
    assert exact_match(response, truth) == expected


@pytest.mark.parametrize("text, answer", [
    (r"so \boxed{42}", "42"), (r"\boxed{1} then \boxed{ \frac{1}{2} }", r"\frac{1}{2}"), ("48/2=24\n#### 72", "72"),
    ("#### 1\n#### 1,072 \nmore", "1,072"), ("the answer is 42", None), (r"\boxed{never closed", None), ("####", None)])
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize("text, expected", [
    (r"so \boxed{42}", 1.0), ("#### 7", 1.0), ("the answer is 42", 0.0), (r"\boxed{never closed", 0.0), ("####", 0.0),
    (r"\boxed{}", 0.0)])
def test_marks_answer(text, expected):
    """Whatever the truth is."""
    assert marks_answer(text, "42") == expected


@pytest.mark.parametrize("response, truth", [
    ("82", "82"), ("082", "82"), ("+82", "82"), ("3+7=10", "10"), ("so it is\n#### 42", "42"), ("#### 1,072", "1072"),
    ("#### $72", "72"), ("72", "24+48=72\n#### 72"), (r"\boxed{\frac12}", "1/2"), ("0.5", r"\frac{1}{2}"),
    (r"Thus \boxed{1+x^2}.", "x^2+1"), (r"\boxed{(1, 2)}", "(1,2)"), (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{50\%}", r"50\%"), ("it is $\\frac{2}{4}$", "0.5")])
def test_math_equal_accepts(response, truth):
    assert math_equal(response, truth) == 1.0


@pytest.mark.parametrize("response, truth", [
    ("820", "82"), ("-82", "82"), ("", "82"), ("+", "82"), ("82+", "820"), ("#### 41", "42"),
    (r"\boxed{41} not 42", "42"), (r"\boxed{x^2-1}", "x^2+1"), (r"\frac{", "1/2"), ("=====", "5"), ("9" * 5000, "82"),
    ("\x00\ufffd", "7")])
def test_math_equal_refuses(response, truth):
    assert math_equal(response, truth) == 0.0


@settings(max_examples=60, deadline=None)
@given(response=st.text("0123456789+-=^/*(){}\\$.,# boxedfrac", max_size=20),
       truth=st.text("0123456789/.x", max_size=6))
def test_math_equal_never_raises(response, truth):
    """Short texts from the alphabet of answers; long ones are bounded by math-verify's own time limit."""
    assert math_equal(response, truth) in (0.0, 1.0)


def test_math_equal_works_outside_the_main_thread():
    results: list[float] = []
    pairs = [(r"\boxed{\frac{2}{4}}", "1/2"), (r"\boxed{3}", "1/2")]
    thread = threading.Thread(target=lambda: results.extend(math_equal(*pair) for pair in pairs))
    thread.start()
    thread.join()
    assert results == [1.0, 0.0]


def test_equal_integers_need_no_parser(monkeypatch):
    monkeypatch.setattr(rules, "_verify", lambda *_: pytest.fail("parsed"))
    assert [math_equal(r, "82") for r in ("82", "082", "#### 82", r"\boxed{82}", "83")] == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_time_limit_is_a_wrong_answer(monkeypatch):
    """The limit is simulated by the exception that math-verify raises; no clock is involved."""
    import math_verify
    from math_verify.errors import TimeoutException

    def late(*_, **__):
        raise TimeoutException("late")

    monkeypatch.setattr(math_verify, "verify", late)
    assert math_equal("1/2", "0.5") == 0.0
