# SPDX-License-Identifier: Apache-2.0
"""Building reward functions from a config, and what happens when the user's one misbehaves."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards.scoring import build_reward_function, score_rollouts
from megatron_rl.types import Prompt, Rollout, UserError

SIGNATURE = "data_source, solution_str, ground_truth, extra_info"


def make_rollout(response: str = "82", truth: str = "82") -> Rollout:
    prompt = Prompt(17, np.zeros(2, np.int32), "37+45=", truth, "sums", {"level": 3})
    return Rollout(prompt, 5, np.asarray([*response.encode()], np.int32), np.zeros(len(response), np.float32), "stop",
                   response=response)


def build(directory: Path, code: str, name: str = "f"):
    file = directory / "reward.py"
    file.write_text(code)
    return build_reward_function(RewardConfig(function=f"{file}:{name}"))


@pytest.mark.parametrize("rule, response, expected", [
    ("exact", " 82 ", 1.0), ("exact", "82.0", 0.0), ("math", "82.0", 1.0), ("math", "83", 0.0)])
def test_rules(rule, response, expected):
    rollout = make_rollout(response)
    score_rollouts([rollout], build_reward_function(RewardConfig(rule=rule)))
    assert (rollout.reward, rollout.reward_components) == (expected, {})


def test_user_function_gets_all_four_arguments(tmp_path):
    function = build(tmp_path, f"def f({SIGNATURE}, weight=2):\n"
                               "    return {'score': weight * len(solution_str), 'level': extra_info['level'],\n"
                               "            'right': solution_str == ground_truth, 'source': data_source}\n")
    rollouts = [make_rollout("82"), make_rollout("8")]
    score_rollouts(rollouts, function)
    assert [r.reward for r in rollouts] == [4.0, 2.0]
    assert [r.reward_components for r in rollouts] == [{"level": 3.0, "right": 1.0}, {"level": 3.0, "right": 0.0}]


def test_decode_fills_the_response():
    rollout = make_rollout("82")
    rollout.response = ""
    score_rollouts([rollout], build_reward_function(RewardConfig()), decode=lambda ids: bytes(ids).decode())
    assert (rollout.response, rollout.reward) == ("82", 1.0)


@pytest.mark.parametrize("value, expected", [
    ("True", 1.0), ("3", 3.0), ("np.float32(0.5)", 0.5), ("np.array(2)", 2.0), ("np.bool_(True)", 1.0)])
def test_numbers_of_all_kinds(tmp_path, value, expected):
    rollout = make_rollout()
    score_rollouts([rollout], build(tmp_path, f"import numpy as np\ndef f({SIGNATURE}): return {value}"))
    assert rollout.reward == expected and type(rollout.reward) is float


def test_extra_info_of_the_prompt_is_not_changed(tmp_path):
    rollout = make_rollout()
    score_rollouts([rollout], build(tmp_path, f"def f({SIGNATURE}):\n    extra_info['x'] = 1\n    return 0"))
    assert rollout.prompt.extra_info == {"level": 3}


def test_module_with_dataclasses_loads(tmp_path):
    code = ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass F:\n"
            f"    gain: float = 2.0\n    def __call__(self, {SIGNATURE}): return self.gain\nf = F()\n")
    rollout = make_rollout()
    score_rollouts([rollout], build(tmp_path, code))
    assert rollout.reward == 2.0


@pytest.mark.parametrize("code, message", [
    ("g = 1", 'defines no "f"'), ("f = 3", "is a int and cannot be called"),
    ("def f(a, b, c, d): pass", "four arguments"),
    (f"def f({SIGNATURE}, more): pass", "missing a required argument: 'more'"),
    ("def f(solution_str, ground_truth): pass", "four arguments"), (f"async def f({SIGNATURE}): pass", "async"),
    ("def f(:", "SyntaxError"), ("import nowhere_to_be_found", "ModuleNotFoundError"),
    ("raise SystemExit(3)", "SystemExit")])
def test_unusable_functions_fail_when_loaded(tmp_path, code, message):
    with pytest.raises(UserError, match=message):
        build(tmp_path, code)


def test_import_errors_name_the_line(tmp_path):
    for code in ("x = 1\ny = (\n", "x = 1\ny = 1 / 0\n"):
        with pytest.raises(UserError) as caught:
            build(tmp_path, code)
        assert caught.value.source == f"reward.function, {tmp_path / 'reward.py'}:2"


@pytest.mark.parametrize("function", ["reward.py", ":f", "reward.py:", "nowhere.py:f"])
def test_unusable_names(tmp_path, monkeypatch, function):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("")
    with pytest.raises(UserError, match="path.py:name"):
        build_reward_function(RewardConfig(function=function))


def test_exception_names_rollout_and_line(tmp_path):
    code = ("import json\ndef helper(text):\n    return json.loads(text)\n"
            f"def f({SIGNATURE}):\n    return helper(solution_str)\n")
    rollout = make_rollout("begin " + "x" * 5000 + " end")
    with pytest.raises(UserError) as caught:
        score_rollouts([rollout], build(tmp_path, code))
    message = str(caught.value)
    assert "prompt_id 17, sample_index 5, data_source \"sums\"" in message and "JSONDecodeError" in message
    assert "begin xx" in message and "xx end" in message and "(5012 characters)" in message
    assert caught.value.source == f"{tmp_path / 'reward.py'}:3"  # the deepest line of the user's own file
    assert len(message) < 1000


@pytest.mark.parametrize("value", [
    "None", "'1.0'", "float('nan')", "float('inf')", "10**400", "[1.0]", "{}", "{'reward': 1.0}", "{'score': None}",
    "{'score': 1.0, 'part': float('nan')}"])
def test_what_is_not_a_finite_score_is_refused(tmp_path, value):
    rollout = make_rollout()
    with pytest.raises(UserError, match="prompt_id 17, sample_index 5"):
        score_rollouts([rollout], build(tmp_path, f"def f({SIGNATURE}): return {value}"))
    assert math.isnan(rollout.reward)
