# SPDX-License-Identifier: Apache-2.0
"""Loading reward functions by name, and what is wrong with those that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_rl.rewards.functions import load_reward_function
from megatron_rl.types import UserError
from reward_samples import SIGNATURE


def write_module(directory: Path, code: str) -> Path:
    file = directory / "reward.py"
    file.write_text(code)
    return file


def load(directory: Path, code: str, name: str = "f"):
    return load_reward_function(f"{write_module(directory, code)}:{name}")


def call(function, response: str = "82"):
    return function(data_source="sums", solution_str=response, ground_truth="82", extra_info={"level": 3})


@pytest.mark.parametrize(
    "rule, response, expected",
    [("exact", " 82 ", 1.0), ("exact", "82.0", 0.0), ("format", "#### 83", 1.0), ("format", "82", 0.0)],
)
def test_rules(rule, response, expected):
    assert call(load_reward_function(rule), response) == expected


@pytest.mark.parametrize("answer, scores", [("marked", [1.0, 0.0, 0.0]), ("any", [1.0, 1.0, 0.0])])
def test_the_rule_math_takes_the_answers_it_is_told_to(answer, scores):
    rule = load_reward_function("math", answer=answer)
    assert [call(rule, response)["score"] for response in ("#### 82.0", "82.0", "83")] == scores
    assert [call(rule, response)["unmarked_answers"] for response in ("#### 82.0", "82.0")] == [0.0, 1.0]


def test_a_function_may_require_further_arguments(tmp_path):
    """Those that a run knows; any other one without a default is refused when the function is loaded."""
    function = load(tmp_path, f"def f({SIGNATURE}, finish_reason, step): return step")
    assert function("", "", "", {}, "stop", 3) == 3
    with pytest.raises(UserError, match="missing a required argument: 'weather'"):
        load_reward_function(f"{write_module(tmp_path / '..', f'def f({SIGNATURE}, weather): return 1')}:f")


def test_user_function_with_further_defaults(tmp_path):
    function = load(tmp_path, f"def f({SIGNATURE}, weight=2): return weight * len(solution_str) + extra_info['level']")
    assert call(function) == 7


def test_module_with_dataclasses_loads(tmp_path):
    code = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass F:\n"
        f"    gain: float = 2.0\n    def __call__(self, {SIGNATURE}): return self.gain\nf = F()\n"
    )
    assert call(load(tmp_path, code)) == 2.0


def test_a_file_is_imported_once(tmp_path):
    """Its functions share their module, so that a model loaded on import is loaded once; a changed file is read."""
    code = (
        f"state = []\ndef f({SIGNATURE}): state.append(1); return len(state)\ndef g({SIGNATURE}): return len(state)\n"
    )
    f, g = load(tmp_path, code, "f"), load_reward_function(f"{tmp_path / 'reward.py'}:g", "reward.components[1]")
    assert (call(f), call(g)) == (1, 1)
    changed = write_module(tmp_path, code.replace("len(state)", "-1"))
    os.utime(changed, ns=(0, 10**9))  # the clock of a file system may be too coarse to show the change
    assert call(load_reward_function(f"{changed}:f")) == -1


@pytest.mark.parametrize(
    "code, message",
    [
        ("g = 1", 'defines no "f"'),
        ("f = 3", "is a int and cannot be called"),
        ("def f(a, b, c, d): pass", "four arguments"),
        (f"def f({SIGNATURE}, more): pass", "missing a required argument: 'more'"),
        ("def f(solution_str, ground_truth): pass", "four arguments"),
        (f"async def f({SIGNATURE}): pass", "async"),
        ("def f(:", "SyntaxError"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_unusable_functions_fail_when_loaded(tmp_path, code, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, code)


def test_import_errors_name_the_line(tmp_path):
    for code in ("x = 1\ny = (\n", "x = 1\ny = 1 / 0\n"):
        with pytest.raises(UserError) as caught:
            load(tmp_path, code)
        assert caught.value.source == f"reward.function, {tmp_path / 'reward.py'}:2"


@pytest.mark.parametrize("function", ["reward.py", ":f", "reward.py:", "nowhere.py:f", "maths"])
def test_unusable_names(tmp_path, monkeypatch, function):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("")
    with pytest.raises(UserError, match="path.py:name") as caught:
        load_reward_function(function, "reward.components[2]")
    assert caught.value.source == "reward.components[2]"
