# SPDX-License-Identifier: Apache-2.0
"""Rewards of one rank's rollouts: the same whether or not scoring began early, with every kind of source.

That scoring overlaps a real generation: tests/transfer/test_hybrid_streaming.py.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards import plan
from megatron_rl.rewards.calls import check_dispatch, check_holders
from megatron_rl.rewards.plan import build_reward_plan, check_truths
from megatron_rl.rewards.scoring import COUNTS, Scorer
from megatron_rl.types import Rollout, UserError
from reward_samples import decode, make_rollout, wait_for_end, wait_for_file, write_function


@contextmanager
def open_scorer(max_response_length: int = 10, **settings: Any) -> Iterator[Scorer]:
    config = RewardConfig(**settings)
    scorer = plan.open_scorer(build_reward_plan(config, max_response_length), decode)
    try:
        yield scorer
    finally:
        scorer.close()


def make_rollouts() -> list[Rollout]:
    return [
        replace(make_rollout(text, sample_index=i), response="")
        for i, text in enumerate(["82", "#### 82", "83", "", "0082"])
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("num_begun", [0, 3, 5])
def test_weighted_sum_does_not_depend_on_when_it_began(tmp_path, workers, num_begun):
    """By hand: math + 0.5 format - 0.1 length, minus the overlong part of responses of more than 6 of 10 tokens."""
    function = write_function(tmp_path, "return {'score': len(solution_str), 'level': extra_info['level']}")
    components = ["1 math_any", "0.5 format", f"-0.1 {function}"]
    rollouts = make_rollouts()
    with open_scorer(components=components, workers=workers, overlong_buffer_length=4) as scorer:
        assert scorer.is_concurrent == (workers > 0)
        for rollout in reversed(rollouts[:num_begun]):  # responses finish in any order
            scorer.begin(rollout)
        done = list[None]()
        rollouts = scorer.finish(rollouts, count=lambda: done.append(None))
    assert len(done) == 5
    assert [r.response for r in rollouts] == ["82", "#### 82", "83", "", "0082"]
    assert [r.reward for r in rollouts] == pytest.approx([1 - 0.2, 1 + 0.5 - 0.7 - 0.25, -0.2, 0.0, 1 - 0.4])
    assert rollouts[1].reward_components == {
        "math": 1.0,
        "format": 1.0,
        "f": 7.0,
        "f/level": 3.0,
        "overlong": -0.25,
        **dict.fromkeys(COUNTS, 0.0),
    }
    assert [r.reward_components["unmarked_answers"] for r in rollouts] == [1.0, 0.0, 1.0, 1.0, 1.0]


def test_single_source_keeps_its_own_components(tmp_path):
    function = write_function(tmp_path, "return {'score': 2, 'level': extra_info['level']}")
    with open_scorer(function=function) as scorer:
        [scored] = scorer.finish(make_rollouts()[:1])
    assert (scored.reward, scored.reward_components) == (2.0, {"level": 3.0})


def test_what_an_environment_reports_is_kept_beside_the_score_of_a_source(tmp_path):
    """With a reward of its own, and without one, which a function gives; equal names are made distinct."""
    function = write_function(tmp_path, "return {'score': 2, 'level': extra_info['level']}")
    rollout = replace(make_rollouts()[0], reward_components={"calls": 4.0, "level": 9.0, "mean": 5.0})
    with open_scorer(function=function) as scorer:
        open_, judged = scorer.finish([rollout, replace(rollout, reward=0.5)])
    given = {"calls": 4.0, "environment/mean": 5.0}
    assert (open_.reward, open_.reward_components) == (2.0, given | {"environment/level": 9.0, "level": 3.0})
    assert (judged.reward, judged.reward_components) == (0.5, given | {"level": 9.0})


@pytest.mark.parametrize("workers", [0, 1])
def test_functions_are_told_more_where_they_ask_for_it(tmp_path, workers):
    """By name or as **kwargs; every function gets verl's four."""
    named = write_function(
        tmp_path,
        "return {'score': len(response_tokens), 'step': step, 'cut': finish_reason == 'length',\n"
        "        'row': row['reward_model']['style'] == 'rule', 'first': response_tokens[0]}",
        name="named.py",
        further=", response_tokens, finish_reason, step, row",
    )
    every = write_function(tmp_path, "return len(further)", name="every.py", further=", **further")
    rollout = make_rollout("82")
    prompt = replace(rollout.prompt, row={"reward_model": {"style": "rule"}})
    rollout = replace(rollout, prompt=prompt, finish_reason="length")
    with open_scorer(components=[f"1 {named}", f"10 {every}"], workers=workers) as scorer:
        [scored] = scorer.finish([rollout], step=7)
    assert scored.reward == 52.0
    assert scored.reward_components == {
        "f": 2.0,
        "f/step": 7.0,
        "f/cut": 1.0,
        "f/row": 1.0,
        "f/first": 56.0,
        "f_2": 5.0,
    }


@pytest.mark.parametrize("settings", [dict(components=["{f}", "{f}"]), dict(function="{f}")])
def test_a_reward_too_large_to_sum_is_an_error_that_names_the_response(tmp_path, settings):
    function = write_function(tmp_path, "return 1e308")
    settings = {name: [f"1 {function}"] * 2 if name == "components" else function for name in settings}
    with open_scorer(**settings) as scorer, pytest.raises(UserError, match="the reward is (inf|1e.308)") as caught:
        scorer.finish([make_rollout("82")])
    assert "prompt_id 17, sample_index 5" in str(caught.value)


@pytest.mark.parametrize(
    "imports, body",
    [
        ("import os", "os._exit(0)"),
        ("from os import _exit", "_exit(0)"),
        ("import os", "if os.fork() == 0: os._exit(0)\nos.wait()\nos._exit(0)"),
    ],
)
def test_a_function_cannot_end_the_rank_without_a_word(tmp_path, imports, body):
    """Children that the function forks end as always; threads that it starts are not covered."""
    exit_of_the_process = os._exit
    with open_scorer(function=write_function(tmp_path, body, imports=imports)) as scorer:
        with pytest.raises(UserError, match=r"raised ProcessExit: os\._exit\(0\)") as caught:
            scorer.finish([make_rollout("82")])
    assert "prompt_id 17" in str(caught.value) and os._exit is exit_of_the_process


def test_what_a_function_leaves_behind_ends_with_the_run(tmp_path):
    """With workers: 0, children of the rank and theirs; other children stay."""
    function = write_function(
        tmp_path,
        "child = subprocess.Popen(['sh', '-c', 'sleep 1000 & echo $! > pid; wait'], cwd=data_source)\n"
        "open(data_source + '/child', 'w').write(str(child.pid))\nreturn 1",
        imports="import subprocess",
    )
    rollout = make_rollout("82")
    rollout = replace(rollout, prompt=replace(rollout.prompt, data_source=str(tmp_path)))
    with subprocess.Popen(["sleep", "1000"]) as other:
        with open_scorer(function=function) as scorer:
            scorer.finish([rollout])
            grandchild = int(wait_for_file(tmp_path / "pid"))
        for pid in (grandchild, int((tmp_path / "child").read_text())):
            wait_for_end(pid)
        assert other.poll() is None
        other.kill()


def test_only_a_model_leaves_the_reward_to_it():
    rollouts = make_rollouts()
    with open_scorer(components=["1.0 model"], workers=2) as scorer:
        rollouts = scorer.finish(rollouts)
        assert not scorer.is_concurrent
    assert [(r.reward, r.reward_components) for r in rollouts] == [(0.0, {})] * 5


def test_workers_score_before_they_are_waited_for(tmp_path):
    function = write_function(tmp_path, f"open({str(tmp_path / 'seen')!r}, 'w').write(solution_str)\nreturn 1")
    rollouts = make_rollouts()
    with open_scorer(function=function, workers=1) as scorer:
        scorer.begin(rollouts[0])
        assert wait_for_file(tmp_path / "seen") == "82"
        [scored] = scorer.finish(rollouts[:1])
    assert scored.reward == 1.0


def test_rollouts_of_two_generations_are_kept_apart(tmp_path):
    """Identity decides, not the prompt id: a prompt can come twice in a step."""
    function = write_function(tmp_path, "return len(solution_str)")
    first, second = make_rollout("82"), make_rollout("0082")
    with open_scorer(function=function, workers=1) as scorer:
        scorer.begin(first)
        scorer.begin(second)
        assert [r.reward for r in scorer.finish([second])] == [4.0]
        assert [r.reward for r in scorer.finish([first])] == [2.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_first_failure_in_order_is_raised(tmp_path, workers):
    function = write_function(tmp_path, "if len(solution_str) != 2: raise OSError(len(solution_str))\nreturn 1")
    rollouts = make_rollouts()
    with open_scorer(function=function, workers=workers) as scorer:
        for rollout in reversed(rollouts):
            scorer.begin(rollout)
        with pytest.raises(UserError, match="raised OSError: 7") as caught:
            scorer.finish(rollouts)
    assert "sample_index 1" in str(caught.value)


def test_unreachable_service_stops_or_falls_back():
    """Port 9 (discard) of the loopback: nothing listens there."""
    settings: dict[str, Any] = dict(components=["1 exact", "2 http://127.0.0.1:9/score"], service_retries=1)
    rollouts = make_rollouts()
    with open_scorer(**settings) as scorer, pytest.raises(UserError, match="in 2 attempt"):
        scorer.finish(rollouts)
    with open_scorer(**settings, service_on_failure="fallback") as scorer:
        scored = scorer.finish(rollouts)
    assert scored[0].reward == 1.0
    assert scored[0].reward_components == {"exact": 1.0, "service": 0.0, "service_failures": 1.0}


GROUP = """
def rank(prompt, completions, ground_truth, extra_info, step, *, scale=1.0):
    \"\"\"Share of the other responses that are longer; the arguments are noted.\"\"\"
    with open({log!r}, "a") as log:
        print(prompt, completions, ground_truth, extra_info, step, file=log)
    return [sum(len(b) > len(a) for b in completions) / max(len(completions) - 1, 1) for a in completions]
"""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("num_begun", [0, 3, 8])
def test_group_reward_sees_all_responses_to_a_prompt(tmp_path, workers, num_begun):
    """One call per prompt and step, in order of the samples, beside a rule and a function in workers."""
    (tmp_path / "group.py").write_text(GROUP.format(log=str(tmp_path / "log")))
    single = write_function(tmp_path, "return float(len(solution_str))")
    texts = [("a", "bbb", "cc"), ("dddd", "e", "ff")]
    rollouts = [
        replace(make_rollout(text, prompt_id=prompt, sample_index=i), response="")
        for prompt, group in enumerate(texts)
        for i, text in enumerate(group)
    ]
    components = [f"1 {tmp_path / 'group.py'}:rank", f"10 {single}", "0 exact"]
    later = [make_rollout("x" * n, prompt_id=0, sample_index=n) for n in (0, 1)]  # of step 2, one of them not begun
    with open_scorer(components=components, workers=workers) as scorer:
        for rollout in [*reversed(rollouts), later[1]][:num_begun]:
            scorer.begin(rollout, 2 if rollout is later[1] else 1)
        found = scorer.finish(rollouts, 1)
        assert [r.reward for r in found] == pytest.approx([1 + 10, 30, 0.5 + 20, 40, 1 + 10, 0.5 + 20])
        assert found[2].reward_components["rank"] == 0.5
        assert [r.reward for r in scorer.finish(later, 2)] == pytest.approx([1, 10])
    calls = (tmp_path / "log").read_text().splitlines()
    assert sorted(calls) == [
        "37+45= ['', 'x'] 82 {'level': 3} 2",
        "37+45= ['a', 'bbb', 'cc'] 82 {'level': 3} 1",
        "37+45= ['dddd', 'e', 'ff'] 82 {'level': 3} 1",
    ]


def test_groups_of_one_prompt_are_apart(tmp_path):
    """The prompt occurs twice in a step, its responses end in any order, and one episode has failed."""
    (tmp_path / "group.py").write_text(GROUP.format(log=str(tmp_path / "log")))
    texts = ["a", "bbb", "cc", "dddd", "e", "ff"]
    rollouts = [make_rollout(text, prompt_id=4, sample_index=i % 3) for i, text in enumerate(texts)]
    rollouts[4] = replace(rollouts[4], reward=0.0, finish_reason="timeout")
    components = [f"1 {tmp_path / 'group.py'}:rank", f"10 {write_function(tmp_path, 'return 1.0')}"]
    with open_scorer(components=components, workers=1) as scorer:
        for i in (4, 0, 5, 3, 1):
            scorer.begin(rollouts[i], 1)
        found = [rollout.reward for rollout in scorer.finish(rollouts, 1)]
    assert found == [11.0, 10.0, 10.5, 10.0, 0.0, 11.0]
    calls = [line.split("]")[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert calls == ["37+45= ['a', 'bbb', 'cc'", "37+45= ['dddd', 'ff'"]


def test_group_rewards_of_the_page(tmp_path):
    """Ranks, diversity and an asynchronous pairwise judge, against loops."""
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
    (code,) = (block for block in page.split("```python\n") if block.startswith("# groups.py"))
    (tmp_path / "groups.py").write_text(code.split("```")[0])
    texts = ["a b c", "b", "c d", "", "a b c"]
    rollouts = [make_rollout(text, sample_index=i) for i, text in enumerate(texts)]
    names = ["rank", "diversity", "win_rate"]
    with open_scorer(components=[f"1 {tmp_path / 'groups.py'}:{name}" for name in names]) as scorer:
        found = scorer.finish(rollouts, 1)
    for i, text in enumerate(texts):
        others = [other for j, other in enumerate(texts) if j != i]
        wins = sum(0.5 * (len(text) < len(other)) + 0.5 * (len(text) <= len(other)) for other in others)
        words = [({*text.split()}, {*other.split()}) for other in others]
        overlap = sum(len(a & b) / max(len(a | b), 1) for a, b in words)
        rank = sum(len(other) > len(text) for other in texts)
        expected = np.array([rank, 1 - overlap / 4, wins / 4], np.float64)
        np.testing.assert_allclose([found[i].reward_components[name] for name in names], expected, rtol=1e-15)
        assert found[i].reward == pytest.approx(expected.sum(), rel=1e-15)


def test_mistakes_of_group_rewards(tmp_path):
    """A parameter without a value, a wrong number of scores, and responses that may be on several engines."""
    (tmp_path / "group.py").write_text(
        "def needs(prompt, completions, answer): return []\ndef short(prompt, completions): return [1.0]\n"
    )
    plans = [
        build_reward_plan(RewardConfig(function=f"{tmp_path / 'group.py'}:{name}"), 10) for name in ("needs", "short")
    ]
    with pytest.raises(UserError, match="takes answer, and a group of responses has no such argument"):
        check_truths(plans[0], [make_rollout().prompt])
    assert check_truths(plans[1], [make_rollout().prompt]) == []
    with open_scorer(function=f"{tmp_path / 'group.py'}:short") as scorer:
        with pytest.raises(UserError, match="returned 1 scores for 2 completions"):
            scorer.finish([make_rollout(text, sample_index=i) for i, text in enumerate("ab")])
    assert plans[1].takes_groups and not build_reward_plan(RewardConfig(), 10).takes_groups
    check_dispatch("auto", 1)
    check_dispatch("groups", 2)
    with pytest.raises(UserError, match="rollout.dispatch=auto with 2 engines"):
        check_dispatch("auto", 2)
    ids, group = np.array([7, 7, 9, 9]), np.array([0, 0, 1, 1])
    check_holders(ids, group, np.array([1, 1, 0, 0]))
    with pytest.raises(UserError, match="the responses to prompt_id 9 are on several engines"):
        check_holders(ids, group, np.array([1, 1, 0, 1]))
