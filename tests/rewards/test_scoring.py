# SPDX-License-Identifier: Apache-2.0
"""One function on one response: valid scores, and the errors of invalid ones."""

from __future__ import annotations

import pytest

from megatron_rl.rewards.functions import compute_score, load_reward_function
from megatron_rl.rewards.scoring import Score, parse_score
from megatron_rl.types import UserError
from reward_samples import make_rollout, write_function


def score(directory, body, response="82"):
    function = load_reward_function(write_function(directory, body, imports="import numpy as np, json, sys"))
    return compute_score(function, make_rollout(response))


def test_function_gets_all_four_arguments(tmp_path):
    body = (
        "return {'score': 2 * len(solution_str), 'level': extra_info['level'],\n"
        "        'right': solution_str == ground_truth, 'source': data_source}"
    )
    assert score(tmp_path, body) == Score(4.0, {"level": 3.0, "right": 1.0})
    assert score(tmp_path, body, "8") == Score(2.0, {"level": 3.0, "right": 0.0})


@pytest.mark.parametrize(
    "value, expected",
    [("True", 1.0), ("3", 3.0), ("np.float32(0.5)", 0.5), ("np.array(2)", 2.0), ("np.bool_(True)", 1.0)],
)
def test_numbers_of_all_kinds(tmp_path, value, expected):
    found = score(tmp_path, f"return {value}").value
    assert found == expected and type(found) is float


def test_extra_info_of_the_prompt_is_not_changed(tmp_path):
    function = load_reward_function(write_function(tmp_path, "extra_info['x'] = 1\nreturn 0"))
    sample = make_rollout()
    assert compute_score(function, sample).value == 0.0
    assert sample.prompt.extra_info == {"level": 3}


def test_exception_names_rollout_and_line(tmp_path):
    body = "return help_with(solution_str)\n"
    imports = "import json\ndef help_with(text):\n    return json.loads(text)"
    function = load_reward_function(write_function(tmp_path, body, imports=imports))
    with pytest.raises(UserError) as caught:
        compute_score(function, make_rollout("begin " + "x" * 5000 + " end"))
    message = str(caught.value)
    assert 'prompt_id 17, sample_index 5, data_source "sums"' in message and "JSONDecodeError" in message
    assert "begin xx" in message and "xx end" in message and "(5012 characters)" in message
    assert caught.value.source == f"{tmp_path / 'reward.py'}:3"  # the deepest line of the user's own file
    assert len(message) < 1000


def test_exit_is_an_error_of_the_function(tmp_path):
    with pytest.raises(UserError, match="raised SystemExit: 4") as caught:
        score(tmp_path, "sys.exit(4)")
    assert caught.value.source == f"{tmp_path / 'reward.py'}:3"


@pytest.mark.parametrize(
    "value",
    [
        "None",
        "'1.0'",
        "float('nan')",
        "float('inf')",
        "10**400",
        "[1.0]",
        "{}",
        "{'reward': 1.0}",
        "{'score': None}",
        "{'score': 1.0, 'part': float('nan')}",
    ],
)
def test_what_is_not_a_finite_score_is_refused(tmp_path, value):
    with pytest.raises(UserError, match="prompt_id 17, sample_index 5"):
        score(tmp_path, f"return {value}")


def test_parsing_says_what_is_wrong():
    with pytest.raises(ValueError, match="'no' \\(str\\) as score"):
        parse_score({"score": "no"})
    assert parse_score({"score": 1, "why": "text"}) == Score(1.0)


@pytest.mark.parametrize("name", ["reward", "std", "", "n" * 500, "a\nb", "a\x1b[31m", "format/ok", "\ud800"])
def test_names_that_no_metric_can_have_are_refused(tmp_path, name):
    """At their return, with the file and the rollout."""
    with pytest.raises(UserError, match="a component named") as caught:
        score(tmp_path, f"return {{'score': 1.0, {name!r}: 2.0}}")
    assert "prompt_id 17" in caught.value.found and len(caught.value.found) < 900
    assert score(tmp_path, "return {'score': 1.0, 'length penalty': 2.0}").components == {"length penalty": 2.0}


def test_an_exception_that_cannot_be_printed_is_reported(tmp_path):
    with pytest.raises(UserError, match=r"raised Mute: \(its message cannot be printed: ZeroDivisionError\)") as caught:
        score(tmp_path, "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})")
    assert "prompt_id 17" in caught.value.found
