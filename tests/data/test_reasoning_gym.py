# SPDX-License-Identifier: Apache-2.0
"""Tasks of the package reasoning-gym as prompts, scored by the package.

The default tier has a small module in the package's place; `pip install reasoning-gym` and `-m slow` try all its sets.
"""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
from chat_templates import write_chat_tokenizer

from megatron_rl.config.schema import RewardConfig
from megatron_rl.config.sections import DataConfig
from megatron_rl.data.prompts import load_prompts, name_files
from megatron_rl.data.rows import read_rows
from megatron_rl.extension.reasoning_gym import _open, identify, score_reasoning_gym
from megatron_rl.rewards.plan import build_reward_plan, check_truths
from megatron_rl.rewards.public_sets import find_scorer
from megatron_rl.types import UserError


class Sums:
    """A data set as the package makes them."""

    def __init__(self, size, seed, largest=9):
        self._rows = [(seed + i, largest) for i in range(size)]

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        a, b = self._rows[index]
        return {"question": f"What is {a} + {b}?\n", "answer": str(a + b), "metadata": {"terms": (a, b)}}

    def score_answer(self, answer, entry):
        return 1.0 if int(answer) == sum(entry["metadata"]["terms"]) else 0.01


def create(name, **options):
    if name != "sums":
        raise ValueError(f"Dataset '{name}' not registered")
    return Sums(**options)


class SumsCurriculum:
    """Of the package's form: its level sets an option of the data set."""

    def set_global_level(self, level):
        self._level = level

    def generate_configuration(self, defaults):
        return SimpleNamespace(**defaults, largest=10 ** (1 + self._level))


@pytest.fixture
def package(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=create))
    factory = SimpleNamespace(create_curriculum=lambda name: SumsCurriculum())
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    _open.cache_clear()
    yield
    _open.cache_clear()


def test_tasks_are_prompts_and_their_answers_are_scored_by_the_package(package, tmp_path):
    file = "reasoning-gym:sums?size=3&seed=4&largest=20"
    config = DataConfig(train_files=[file], train_batch_size=1, max_prompt_length=256, max_response_length=8)
    found = load_prompts([file], write_chat_tokenizer(tmp_path, "qwen2.5"), config)
    assert len(found.prompts) == 3
    prompt = found.prompts[1]
    assert prompt.messages[0]["content"].startswith("What is 5 + 20?\n\nWrite your final answer between <answer>")
    assert prompt.data_source == "reasoning-gym:sums"
    plan = build_reward_plan(RewardConfig(function="by_data_source"), 8)
    assert check_truths(plan, found.prompts) == []
    score = find_scorer(prompt.data_source)
    responses = ["<think>24</think> so <answer> 25 </answer>", "<think>so</think>\n25", "<answer>24</answer>", "none"]
    assert [score(response, prompt.ground_truth) for response in responses] == [1.0, 1.0, 0.01, 0.0]


def test_the_default_is_500_tasks_and_what_is_not_there_is_named(package):
    assert sum(1 for _ in read_rows(["reasoning-gym:sums"])) == 500
    for file, message in (("reasoning-gym:chess", "not registered"), ("reasoning-gym:sums?length=1", "TypeError")):
        with pytest.raises(UserError, match=message):
            next(read_rows([file]))


def test_levels_are_those_of_the_package(package):
    """Each has its tasks, which are scored as a set of one level is."""
    rows = list(read_rows(["reasoning-gym:sums?size=2&levels=3&seed=4"]))
    assert [row.columns["level"] for row in rows] == [0, 0, 1, 1, 2, 2]
    single = list(read_rows(["reasoning-gym:sums?size=2&seed=4&level=1"]))
    assert [row.columns["answer"] for row in rows[2:4]] == [row.columns["answer"] for row in single]
    assert single[0].columns["prompt"][0]["content"].startswith("What is 4 + 100?")
    assert score_reasoning_gym("<answer>104</answer>", single[0].columns["answer"]) == 1.0
    assert {row.columns["data_source"] for row in rows} == {"reasoning-gym:sums"}
    for levels in ("x", "0"):
        with pytest.raises(UserError, match=f"levels={levels}"):
            list(read_rows([f"reasoning-gym:sums?levels={levels}"]))


def test_without_the_package_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    _open.cache_clear()
    with pytest.raises(UserError, match="pip install reasoning-gym"):
        next(read_rows(["reasoning-gym:sums"]))


def test_metrics_call_a_set_by_its_name():
    file, other = "reasoning-gym:sums?size=3", "reasoning-gym:sums?size=4"
    assert name_files([file, "a/test.jsonl"]) == {"sums": file, "test": "a/test.jsonl"}
    assert name_files([file, other]) == {file: file, other: other}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
def test_every_set_of_the_package_makes_tasks_and_takes_its_own_answers():
    from reasoning_gym.factory import DATASETS

    found, wrong = 0, []
    for name in sorted(DATASETS.keys() - {"composite"}):  # composite needs a list of other tasks
        rows = list(read_rows([f"reasoning-gym:{name}?size=2&seed=3"]))
        found += len(rows)
        truth = rows[1].columns["answer"]
        if truth["answer"] != "None":
            score = score_reasoning_gym(f"<answer>{truth['answer']}</answer>", truth)
            wrong += [name] * (score < 1.0)
    assert found == 2 * (len(DATASETS) - 1) and len(DATASETS) > 100
    assert wrong == [], wrong
    levels = [row.columns["level"] for row in read_rows(["reasoning-gym:leg_counting?size=2&levels=3"])]
    assert levels == [0, 0, 1, 1, 2, 2]
    assert identify("reasoning-gym:chess").startswith("reasoning-gym:chess 0.")
